// Runs a distributed program on one device of a group.
//
// The program is compiled once for the device: operators are looked up, size arguments are replaced
// by those of the local pieces, every (value, placement) gets a slot, and slots are freed after
// their last use. A step then is a walk over the instructions: a boxed call, or a collective. There
// is no code per operator; what the theory calls an extra rule has a kernel of that name
// (kernels.cc), and random operators draw each element from (seed, step, node, global index), so
// that they do not depend on the sharding.
//
// A device whose piece is empty makes no call: its pieces are empty and its partial sums zero.
// (Where a result also depends on operands that are not cut, the call is made with zeros of size
// one in the place of the empty pieces.)
//
// A program of a pipeline's stage runs in phases (shard/program.h): forward() and backward() once
// per micro-batch, several micro-batches being in flight, and reduce() once per step.
#pragma once

#include <ATen/core/Tensor.h>

#include <functional>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "comm/communicator.h"
#include "interpret/interpret.h"
#include "plan/plan.h"

namespace motley {

struct JoinedCall;
struct Operator;
class Background;

struct ExecutorOptions {
  at::Device device = at::kCPU;
  uint64_t seed = 0;  // of random operators
  // Called around every instruction: emulation of slower devices, tracing. `compute` is false for
  // collectives.
  std::function<void(bool compute)> before;
  std::function<void(bool compute, const void* instruction)> after;
  // [node] The number that names the stream of a random node; empty: its own. And which part of
  // the draws of the whole step a micro-batch's result is; empty: all.
  std::vector<int> random_stream;
  std::vector<PartCut> random_part;
  int parts = 1;  // micro-batches
  // Of a step in parts (shard/duplex.h): which draws are whose, and which steps may run in one call.
  const Duplex* duplex = nullptr;
  // Collectives are started where they stand and waited for where their results are read.
  bool asynchronous = false;
  bool overlap = true;  // false: every collective is waited for where it stands
  // [buffer of the graph] Its updates hold from the next forward pass on; otherwise they are the
  // same in every micro-batch, and hold from the next step on.
  std::vector<bool> updated_by_part;
  // All-reduces of the reduction that are left out: what they would sum is handed on as this rank's
  // term (plan/pipeline.h, JointGradients).
  std::vector<int> left_out;
  // Sees every local tensor as it is made.
  std::function<void(ValueId, Placement, const at::Tensor&)> observe;
};

class Executor {
 public:
  // Everything referred to must outlive the executor.
  Executor(const Theory& theory, const Program& program, const Shares& shares,
           Communicator& communicator, ExecutorOptions options = {});
  ~Executor();

  // Takes this device's piece of a whole tensor: a parameter, a buffer or an input.
  at::Tensor piece(ValueId value, Placement placement, const at::Tensor& whole) const;
  // Shape of this device's piece.
  Shape local_shape(ValueId value, Placement placement) const;
  // How each source is stored.
  Placement stored(ValueId source) const;

  // Sets the local piece of a source. Parameters and buffers stay; inputs are read by the next
  // step.
  void set(ValueId source, at::Tensor local);
  at::Tensor get(ValueId source) const;

  // One step. Buffers are updated; parameters are not. Gradients travel as soon as they are there
  // (cost/overlap.h).
  struct Result {
    at::Tensor loss;  // whole, on every device
    std::vector<at::Tensor>
        gradients;  // [parameter] placed as the parameter is; undefined where there is none
  };
  Result step(int64_t number);

  // One micro-batch between its forward and its backward pass: the tensors held, by slot.
  using Flight = std::vector<at::Tensor>;
  // Runs the forward phase from the sources that are set. Random elements are those of the given
  // micro-batch of the step. Buffers are updated unless it runs `again`.
  Flight forward(int64_t step, int64_t micro_batch, bool again = false);
  // Runs the backward phase; what the reduction starts from is added to what is there of earlier
  // micro-batches as soon as the phase reads it no more. A program whose steps say `later` runs
  // these in weights(), which follows some time.
  void backward(Flight* flight, int64_t step, int64_t micro_batch);
  void weights(Flight* flight, int64_t step, int64_t micro_batch);
  // Hands out an output of the phase that just ran; once.
  at::Tensor take(Flight* flight, ValueId output);
  Placement placement(ValueId output) const { return outputs_.at(output).placement; }
  // This device's part of the loss: whole, or a term of the sum over devices.
  struct Loss {
    at::Tensor value;
    bool partial = false;
  };
  Loss loss(const Flight& flight) const;
  // The gradients summed over the micro-batches, placed as the parameters are; starts anew.
  std::vector<at::Tensor> reduce(int64_t step);
  // The step is over: buffers have their new values.
  void commit();
  // Forgets the piece of an input.
  void unset(ValueId source) { sources_.erase(source); }

  // Of all steps so far: seconds that collectives took, and those for which this device waited. Of
  // gradients that are on their way during the backward pass the waiting alone is known where
  // messages do not say when they arrived (comm/communicator.h).
  struct Communication {
    double seconds = 0, waited = 0;
  };
  Communication communication();

  // Puts a value together from all devices' pieces; collective. For checkpoints and tests.
  at::Tensor gather(ValueId value, Placement placement, const at::Tensor& local,
                    PieceForm form = PieceForm::padded);

 private:
  struct Instruction;
  struct Travelling;
  int slot(ValueId value, Placement placement) const;
  // In compile.cc.
  void compile();
  std::vector<std::vector<int>> assign_slots(const Phases& phases);
  Instruction compiled(const Step& step) const;
  bool join(std::vector<Instruction>* calls, const JoinedCall& call) const;
  void set_operator(const Triple& triple, std::vector<Shape> operand_shapes, Instruction* in) const;
  void mark_sums();
  void pass_whole();
  void run(size_t begin, size_t end, int64_t step, int64_t micro_batch);
  at::Tensor loss_of(Placement* placement) const;
  std::vector<at::Tensor> gradients() const;
  void update_buffers();
  void add_up(int slot);
  void run_summing(Flight* flight, size_t begin, size_t end, int64_t step, int64_t micro_batch);
  at::Tensor converted(const Instruction& instruction, at::Tensor from);
  // In asynchronous.cc.
  void start(const Instruction& instruction);
  void arrive(int slot);
  void arrive_for(const Instruction& instruction);
  void arrive_all();
  at::Tensor exchange(const Instruction& instruction);
  void send(const Instruction& instruction);
  std::vector<at::Tensor> compute(const Instruction& instruction, int64_t step_number,
                                  int64_t micro_batch);
  std::vector<at::Tensor> compute_joined(const Instruction& instruction);

  const Theory& theory_;
  const Program& program_;
  Shares shares_;  // a copy: it remembers pieces as they are asked for, and executors are threads
  Communicator& communicator_;
  ExecutorOptions options_;
  std::vector<Placement> stored_;
  std::map<std::pair<ValueId, Placement>, int> slots_;
  std::vector<at::Tensor> values_;  // [slot]
  std::vector<Instruction> instructions_;
  // [message] All-reduces of gradients on their way, in step() only.
  struct Sent {
    at::Tensor bucket;
    std::unique_ptr<Message> message;
    double begun = 0;
  };
  void wait_for(const Sent& sent);
  std::vector<Sent> sent_;
  bool overlap_ = false;
  std::map<ValueId, at::Tensor> sources_;  // local pieces
  std::map<ValueId, at::Tensor> next_;     // of buffers, from the next step on
  struct Output {
    Placement placement;
    int slot;
    bool released;  // nothing reads it after its phase
  };
  std::map<ValueId, Output> outputs_;
  size_t backward_ = 0, weights_ = 0, reduction_ = 0;    // first instructions of these phases
  std::vector<int> accumulated_;                         // slots that the reduction starts from
  Flight sums_;                                          // of them
  bool summing_ = false;                                 // in backward()
  std::vector<std::shared_ptr<Travelling>> travelling_;  // [slot]
  double waited_ = 0, blocked_ = 0;         // for what travels; in collectives that do not
  double hidden_ = 0, last_arrival_ = 0;    // of gradients on their way: beside computation
  std::unique_ptr<Background> background_;  // ends before what it uses
};

}  // namespace motley
