// The default engine: exact dynamic programming over the frontier of a folded elimination order.
//
// Nodes are eliminated one by one (order.h). A *state* gives each live value either the set of
// forms available so far (its producer is eliminated) or the set of forms required so far (only
// consumers are). Eliminating a node picks one of its options; a form that an input lacks is bought
// along a chain of conversions, which makes every form on the chain available; an output met by its
// consumers first is completed to all the forms they required. States that agree are one state at
// the lesser cost, so conversions are paid once however many consumers share them.
//
// The cost of a state is what it has paid plus a lower bound of what is left (dual_bounds.h),
// counted from the bound of the whole problem. No step lowers it, so states costlier than a *slack*
// are dropped; once the final state costs no more than any that was dropped, it is optimal, and so
// the slack starts tiny and grows until that holds. The bound of captured transformers is tight: a
// pass then keeps about one state per step.
//
// Exact reductions:
//  - sets are closed under free conversions (a replicated tensor has all shards), and forms that
//    can help no remaining consumer are dropped;
//  - an option is dropped if another does as well after converting to its inputs and from its
//    outputs;
//  - a state is dropped if another costs no more after paying for all the forms it lacks
//    (available sets), or for all the forms it requires in excess (required sets);
//  - the transitions of a node depend on its kind and on the sets of the values it touches only,
//    and are tabulated (tables.h).
//
// Repeated blocks: dominance and slack look at differences of cost only, so the frontier after a
// block is a function of the frontier before it, up to a constant. Once the frontier, relative to
// its least cost, equals that of an earlier block boundary, the blocks in between are skipped: they
// would cost the same constant each, and the choices of the repeated block are replayed for them.
// Depth is then nearly free.
//
// Cost: the sweeps of dual_bounds.h, which dominate where the bound is tight; else states *
// transitions per step, states growing with the gap. Limits::max_states bounds the states of one
// step: beyond it the costliest are dropped, and the lower bound of the answer is the least of what
// the dropped might have cost. The search is a beam from there on, skips no blocks, and says so.
// The time limit is looked at between steps; past it the search goes on as a narrow beam to have an
// answer.
#pragma once

#include "solver/order.h"
#include "solver/problem.h"

namespace motley::solver {

// What a solve leaves to the next one of the same wiring at other costs: the multipliers of its
// bound, from which the sweeps of dual_bounds.h go on.
using WarmStart = std::vector<double>;

// The best program of an additive price. `order` may come from any problem with the same wiring,
// tables of the same forms and the same table numbers; only costs may differ.
Solution solve_folded(const Problem& problem, const Order& order, const Weights& weights,
                      const Limits& limits = {}, WarmStart* warm = nullptr);

}  // namespace motley::solver
