// Plans of autoparallel (readers/autoparallel.h) as plans of motley.
//
// Dimensions of the mesh along which every product takes a part of the rows are replicas, those that
// divide products in another way (or, if none does, the last) are the devices of one program. Of the
// program are given: how every parameter is stored, and how products, lookups and attention make their results; they are the operators that both graphs have, the same number of each
// shape, in the order of the graphs. What lies between them the search decides, at least cost. A
// parameter that the file cuts over replicas, strided or not, is gathered once in a step and its gradient scattered,
// as replicas do that divide gradients and optimizer (ZeRO 2).
#include "readers/autoparallel.h"

#include <algorithm>
#include <map>
#include <set>

#include "cluster/backend.h"
#include "cluster/part.h"
#include "core/error.h"
#include "export/plan_files.h"
#include "planner/alternation.h"
#include "shard/restricted.h"
#include "sim/simulate.h"

namespace motley::exports {

using readers::AutoparallelNode;
using readers::AutoparallelPlan;

namespace {

// Operators that carry the work; what is between them follows their placements.
bool is_product(const std::string& op) {
  static const std::set<std::string> products = {
      "aten::addmm",
      "aten::baddbmm",
      "aten::bmm",
      "aten::convolution",
      "aten::einsum",
      "aten::embedding",
      "aten::embedding_dense_backward",
      "aten::linear",
      "aten::matmul",
      "aten::mm",
  };
  return products.contains(op) || op.starts_with("aten::_scaled_dot_product");
}

bool is_tensor_input(const AutoparallelNode& node) {
  return node.op == "placeholder" && !node.tangent && !node.placement.empty();
}

// What dimensions of the mesh are.
struct Layout {
  int program = 0;                        // the dimension whose placements the program has
  std::vector<int> programs, replicas;    // dimensions
  std::vector<std::vector<int>> devices;  // [replica][rank]
  int count() const { return static_cast<int>(devices.size()); }
};

// The first product that does not take a part of the rows in a dimension of the mesh; null: all do.
const AutoparallelNode* not_by_rows(const AutoparallelPlan& file, int dim) {
  for (const AutoparallelNode& node : file.nodes) {
    if (!is_product(node.op) || node.placement.empty()) continue;
    const Placement p = node.placement[dim];
    const bool rows = p == Placement::shard(0);
    if (!rows && !(node.backward && p.is_partial())) return &node;
  }
  return nullptr;
}

// Every node is held alike along both dimensions.
bool alike(const AutoparallelPlan& file, int a, int b) {
  return std::all_of(file.nodes.begin(), file.nodes.end(), [&](const AutoparallelNode& node) {
    return node.placement.empty() || node.placement[a] == node.placement[b];
  });
}

Layout layout_of(const AutoparallelPlan& file, const Cluster& cluster, const std::string& name) {
  int64_t devices = 1;
  std::vector<std::vector<int>> groups;  // dimensions that are held alike
  for (size_t d = 0; d < file.mesh.size(); ++d) {
    devices *= file.mesh[d];
    if (file.mesh[d] == 1) continue;
    const int dim = static_cast<int>(d);
    const auto same = std::find_if(groups.begin(), groups.end(), [&](const std::vector<int>& g) {
      return alike(file, g[0], dim);
    });
    if (same == groups.end())
      groups.push_back({dim});
    else
      same->push_back(dim);
  }
  if (devices != cluster.size())
    throw user_error("import",
                     "{}: mesh.shape [{}] is of {} devices, {} has {}; give --cluster of as many",
                     name, fmt::join(file.mesh, ", "), devices, cluster.name, cluster.size());
  const bool products = std::any_of(
      file.nodes.begin(), file.nodes.end(),
      [](const AutoparallelNode& n) { return is_product(n.op) && !n.placement.empty(); });
  if (!products)
    throw user_error(
        "import", "{}: nodes have no matrix product; give the plan of a model's whole step", name);
  Layout layout;
  int own = -1;  // the group of the program
  for (size_t g = 0; g < groups.size(); ++g) {
    const AutoparallelNode* node = not_by_rows(file, groups[g][0]);
    if (!node) continue;
    if (own >= 0)
      throw user_error("import",
                       "{}.placement: dimensions {} and {} of the mesh both divide other things "
                       "than rows, and motley's programs have one; give a plan of a mesh with one",
                       node->where, groups[own][0], groups[g][0]);
    own = static_cast<int>(g);
  }
  if (own < 0) own = static_cast<int>(groups.size()) - 1;
  for (size_t g = 0; g < groups.size(); ++g) {
    auto& to = static_cast<int>(g) == own ? layout.programs : layout.replicas;
    to.insert(to.end(), groups[g].begin(), groups[g].end());
  }
  if (own >= 0) layout.program = groups[own][0];
  for (const AutoparallelNode& node : file.nodes)
    for (const int d : layout.programs)
      if (!node.placement.empty() && node.strided[d])
        throw user_error("import",
                         "{}.placement: dimension {} of the mesh cuts pieces of another one (a "
                         "strided shard), and a program of motley whole tensors; give a plan of a "
                         "mesh whose dimension {} is the last",
                         node.where, d, d);
  // Ranks count the last dimension fastest; a replica is the ranks that are alike in `replicas`.
  std::map<std::vector<int>, std::vector<int>> replicas;
  for (int rank = 0; rank < cluster.size(); ++rank) {
    std::vector<int> at(file.mesh.size()), key;
    int rest = rank;
    for (size_t d = file.mesh.size(); d-- > 0; rest /= file.mesh[d]) at[d] = rest % file.mesh[d];
    for (const int d : layout.replicas) key.push_back(at[d]);
    replicas[key].push_back(rank);
  }
  for (auto& [key, ranks] : replicas) layout.devices.push_back(std::move(ranks));
  return layout;
}

// What the file says of a graph, as a restriction of its theory.
class Statement {
 public:
  // `parts`: the graph is of one of so many parts of the batch.
  Statement(const AutoparallelPlan& file, const Layout& layout, const Graph& graph, int parts,
            const std::string& name)
      : file_(file), layout_(layout), graph_(graph), parts_(parts), name_(name), theory_(graph) {
    for (const AutoparallelNode& node : file.nodes) {
      if (is_tensor_input(node)) sources_.push_back(&node);
      strided_ += std::count(node.strided.begin(), node.strided.end(), true) > 0 ? 1 : 0;
    }
    parameters();
    inputs();
    products();
    for (const auto& [placement, nodes] : held_)
      MOTLEY_CHECK(theory_.restrict_to(nodes, placement));
  }

  const Theory& theory() const { return theory_; }
  bool divided() const { return divided_ > 0; }
  std::string what() const {
    return fmt::format("{} parameters and {} of {} products are held as it says",
                       graph_.parameters.size(), products_, all_products_);
  }
  std::vector<std::string> differences() const {
    std::vector<std::string> list;
    if (products_ < all_products_)
      list.push_back(
          fmt::format("{} of {} products have no counterpart of their shape in the file: they are "
                      "as is fastest",
                      all_products_ - products_, all_products_));
    if (divided_ > 0 && divided_ < static_cast<int>(graph_.parameters.size()))
      list.push_back(
          fmt::format("replicas divide the state of all parameters, in the file of {} of {}",
                      divided_, graph_.parameters.size()));
    if (strided_ > 0)
      list.push_back(fmt::format(
          "{} tensors are cut over replicas in strided pieces, here in whole ones of the "
          "same size",
          strided_));
    if (divided_ > 0)
      list.push_back(
          "parameters that the file cuts over replicas are stored whole, and gathered once a step");
    return list;
  }

 private:
  // A size of the graph is that of the file, or of a part of the batch.
  bool fits(const Shape& whole, const Shape& part) const {
    return whole.size() == part.size() &&
           std::equal(whole.begin(), whole.end(), part.begin(),
                      [&](int64_t w, int64_t p) { return w == p || w == p * parts_; });
  }

  void hold(const AutoparallelNode& node, NodeId at, const std::string& what) {
    const Placement p = node.placement[layout_.program];
    const std::vector<Triple>& triples = theory_.triples(at);
    if (std::none_of(triples.begin(), triples.end(),
                     [&](const Triple& t) { return !t.out.empty() && t.out[0] == p; }))
      throw user_error("import",
                       "{}.placement: {} in dimension {} of the mesh, which {} cannot be; give a "
                       "plan that holds it in another way",
                       node.where, to_string(p), layout_.program, what);
    held_[p].push_back(at);
  }

  void parameters() {
    if (sources_.size() < graph_.parameters.size())
      throw user_error("import",
                       "{}: nodes have {} placeholders, the model has {} parameters; give --model "
                       "as the file was made of",
                       name_, sources_.size(), graph_.parameters.size());
    for (size_t p = 0; p < graph_.parameters.size(); ++p) {
      const AutoparallelNode& node = *sources_[p];
      const ValueId value = graph_.parameters[p].value;
      const Shape& own = graph_.spec(value).shape;
      if (node.shape != own)
        throw user_error("import",
                         "{}.shape: is [{}], parameter {} of the model, {}, is [{}]; give --model "
                         "as the file was made of",
                         node.where, fmt::join(node.shape, ", "), p, graph_.parameters[p].name,
                         fmt::join(own, ", "));
      if (node.placement[layout_.program].is_partial())
        throw user_error("import",
                         "{}.placement: a parameter is held in partial sums; give R or S(d)",
                         node.where);
      hold(node, graph_.value(value).producer, graph_.parameters[p].name);
      const bool cut = std::any_of(layout_.replicas.begin(), layout_.replicas.end(),
                                   [&](int d) { return node.placement[d].is_shard(); });
      divided_ += cut;
    }
  }

  // What comes in has the shape of an input, or the batch is another. How it comes in is left to the
  // program: every device may have it whole.
  void inputs() {
    if (graph_.inputs.empty()) return;
    for (const Input& input : graph_.inputs)
      for (size_t i = graph_.parameters.size(); i < sources_.size(); ++i)
        if (fits(sources_[i]->shape, graph_.spec(input.value).shape)) return;
    Shape whole = graph_.spec(graph_.inputs[0].value).shape;
    if (!whole.empty()) whole[0] *= parts_;
    throw user_error("import",
                     "{}: no placeholder behind the parameters is [{}], as input {} of the model; "
                     "give --batch and --model as the file was made of",
                     name_, fmt::join(whole, ", "), graph_.inputs[0].name);
  }

  void products() {
    std::map<std::pair<std::string, bool>, std::vector<const AutoparallelNode*>> theirs;
    for (const AutoparallelNode& node : file_.nodes)
      if (is_product(node.op) && !node.placement.empty())
        theirs[{node.op, node.backward}].push_back(&node);
    std::map<std::pair<std::pair<std::string, bool>, Shape>, std::vector<NodeId>> ours;
    for (size_t n = 0; n < graph_.nodes.size(); ++n) {
      const Node& node = graph_.nodes[n];
      if (!is_product(node.op) || node.outputs.empty() || !node.outputs[0].valid()) continue;
      ++all_products_;
      ours[{{node.op, node.phase == Phase::backward}, graph_.spec(node.outputs[0]).shape}]
          .push_back(NodeId(static_cast<int>(n)));
    }
    for (const auto& [key, nodes] : ours) {
      std::vector<const AutoparallelNode*> same;
      for (const AutoparallelNode* node : theirs[key.first])
        if (fits(node->shape, key.second)) same.push_back(node);
      if (same.size() != nodes.size()) continue;
      for (size_t i = 0; i < nodes.size(); ++i)
        hold(*same[i], nodes[i], fmt::format("the result of {}", key.first.first));
      products_ += static_cast<int>(nodes.size());
    }
  }

  const AutoparallelPlan& file_;
  const Layout& layout_;
  const Graph& graph_;
  const int parts_;
  const std::string& name_;
  Theory theory_;
  std::vector<const AutoparallelNode*> sources_;  // placeholders of tensors: parameters come first
  std::map<Placement, std::vector<NodeId>> held_;
  int divided_ = 0, strided_ = 0, products_ = 0, all_products_ = 0;
};

// The fastest program that holds to a statement, in equal shares.
Program program_of(const PlanFileJob& job, const Statement& statement, const Theory& theory,
                   const Cluster& devices, bool hides) {
  planner::AlternationOptions search;
  search.optimizer = job.options.optimizer;
  search.memory_limit = false;
  search.recompute = false;
  search.certify = false;
  search.polish = false;
  search.overlap = hides;
  search.ratios = planner::even_ratios(devices);
  search.limits = job.options.limits;
  const CostModel model(devices);
  const planner::Alternation found = planner::alternate(statement.theory(), model, search);
  if (!found.feasible)
    throw user_error("import", "{}: no program holds its tensors so: {}", job.name, found.reason);
  return renumbered(statement.theory(), theory, found.program);
}

// Replicas of one program.
Statement fill_replicas(const PlanFileJob& job, const AutoparallelPlan& file, const Layout& layout,
                        Plan* plan) {
  const int replicas = layout.count();
  if (plan->batch % replicas != 0)
    throw user_error(
        "import",
        "{}: mesh.shape [{}] makes {} replicas, which do not divide --batch {}; give a "
        "multiple",
        job.name, fmt::join(file.mesh, ", "), replicas, plan->batch);
  plan->pipeline = std::make_unique<PipelinePlan>();
  PipelinePlan& pipeline = *plan->pipeline;
  pipeline.schedule = "1f1b";
  pipeline.micro_batch = plan->batch / replicas;
  pipeline.take_parts(*plan->theory, plan->batch, job.name);
  pipeline.stage_of.assign(pipeline.part().graph.nodes.size(), 0);
  pipeline.cut(1, job.name);
  Statement statement(file, layout, pipeline.graph(0), replicas, job.name);
  std::map<std::string, Program> programs;  // by what a replica's devices are
  for (const std::vector<int>& devices : layout.devices) {
    const Cluster part = part_of(plan->cluster, devices);
    const auto [it, fresh] = programs.try_emplace(to_yaml(part));
    if (fresh)
      it->second = phase_ordered(pipeline.theory(0),
                                 program_of(job, statement, pipeline.theory(0), part, false));
    StagePlan stage;
    stage.devices = devices;
    stage.ratios = planner::even_ratios(part);
    stage.program = it->second;
    pipeline.replicas.push_back({1, {stage}});
  }
  if (statement.divided()) pipeline.zero = {{2, {}}};
  return statement;
}

}  // namespace

PlanFile read_autoparallel(const PlanFileJob& job) {
  const AutoparallelPlan file = readers::read_autoparallel(job.json, job.name);
  const Layout layout = layout_of(file, job.cluster, job.name);
  PlanFile out;
  out.plan = std::make_unique<Plan>();
  Plan& plan = *out.plan;
  plan.engine = "autoparallel";
  plan.model = job.options.model;
  plan.batch = job.options.batch;
  plan.optimizer = job.options.optimizer;
  plan.precision = job.options.precision;
  plan.cluster = job.cluster;
  plan.set_graph(job.step->graph());
  const auto tell = [&](const Statement& statement) {
    out.what = fmt::format(
        "{} of {}, {}",
        layout.count() == 1 ? "one program" : fmt::format("{} replicas", layout.count()),
        layout.devices[0].size() == 1 ? "1 device"
                                      : fmt::format("{} devices", layout.devices[0].size()),
        statement.what());
    out.differences = statement.differences();
  };
  if (layout.count() > 1) {
    tell(fill_replicas(job, file, layout, &plan));
  } else {
    const Statement statement(file, layout, *plan.graph, 1, job.name);
    plan.ratios = {planner::even_ratios(job.cluster)};
    plan.program =
        program_of(job, statement, *plan.theory, job.cluster, backend_of(job.cluster).hides);
    tell(statement);
  }
  const auto problems = check(plan, false);
  MOTLEY_CHECK(problems.empty(), "{}", problems.empty() ? "" : problems[0]);
  for (const std::string& problem : check(plan)) out.differences.push_back(problem);
  const Simulation sim = simulate(plan);
  plan.predicted_step_s = sim.step;
  for (const DeviceTime& device : sim.devices) plan.peak_memory_bytes.push_back(device.peak_memory);
  out.own_s = file.compute + file.comm;
  out.own_what = "computation and communication one after the other, without the optimizer";
  return out;
}

}  // namespace motley::exports
