#pragma once

#include <ATen/core/dispatch/Dispatcher.h>

#include <functional>
#include <map>
#include <memory>
#include <numeric>
#include <set>
#include <string>
#include <unordered_map>
#include <vector>

#include "capture/capture.h"
#include "interpret/dispatch.h"

// What stands behind the dispatch key of a capture (capture.h): sees every ATen call of a step and
// writes it down in functional form. Tensors are known by their storage and geometry, so that
// writes in place and views of one memory are followed. Not for other files than those of the
// capture.
namespace motley::recording {

using torch::jit::Stack;

// A tensor's place in its storage.
struct Geometry {
  std::vector<int64_t> sizes, strides;
  int64_t offset = 0;
  at::ScalarType type = at::kFloat;
  friend bool operator==(const Geometry&, const Geometry&) = default;

  bool contiguous() const {
    int64_t expected = 1;
    for (size_t i = sizes.size(); i-- > 0;) {
      if (sizes[i] != 1 && strides[i] != expected) return false;
      expected *= sizes[i];
    }
    return true;
  }
  int64_t numel() const {
    return std::accumulate(sizes.begin(), sizes.end(), int64_t{1}, std::multiplies<>());
  }
};

bool matches(const Geometry& g, const at::Tensor& t);
Geometry geometry_of(const at::Tensor& t);
TensorSpec spec_of(const Geometry& g);

struct View {
  Geometry geometry;
  int parent = -1;        // -1: the base
  std::string op;         // makes it from the parent ...
  std::vector<Arg> args;  // ... with these arguments after the tensor
  ValueId value;
  int64_t version = -1;  // of the storage when `value` was recorded
};

struct Stored {
  c10::Storage storage;  // held, so that its address stays its own
  std::vector<View> views;
  int64_t version = 0;
  bool outside = false;  // stands for a tensor that was not made in the step
};

// A tensor of the step: a view of a storage.
struct Place {
  Stored* stored = nullptr;
  int view = -1;
  explicit operator bool() const { return stored != nullptr; }
};

class Recorder;
using Handler = void (Recorder::*)(const struct OpInfo&, Stack*);

// What the recorder needs to know of an operator; made at its first call.
struct OpInfo {
  Operator op;
  std::string name;  // as recorded
  Handler handler = nullptr;
  std::vector<TensorSpec> (*shape)(const Graph&, const Node&) = nullptr;
  int written = -1;      // the argument changed in place
  bool several = false;  // changes more than one argument
  bool views = false;    // returns an argument or a view of one
  bool shaped = false;   // reads no numbers of its operands
  bool out = false;      // the changed argument only receives the result
  const OpInfo* functional = nullptr;
  bool has_dtype = false;
  bool has_tensors = false;
};

// A view's op with negative dimensions resolved and sizes made explicit.
struct ViewOp {
  std::string op;
  std::vector<Arg> args;
};

// A dimension counted from the end, as one counted from the start.
int64_t wrap(int64_t dim, size_t rank);
// A number that libtorch wrapped.
bool is_literal(const at::Tensor& t);
// The arguments of the call of `info` that lie on the stack.
c10::IValue* arguments(const OpInfo& info, Stack* stack);
// Replaces the arguments on the stack by one result.
void finish(const OpInfo& info, Stack* stack, c10::IValue result);

class Recorder {
 public:
  Capture result;

  // While false, calls run on the Meta device and nothing is recorded.
  bool recording = false;
  Phase phase = Phase::forward;
  // Forgets the error of a language other than C++ that an exception left behind, once it is
  // handled.
  std::function<void()> forget_error;

  // From here on, reading the memory of `tensor` other than through its Meta tensor is an error
  // that names it.
  void own(const std::string& name, const at::Tensor& tensor);

  void handle(const c10::OperatorHandle& handle, Stack* stack);

  bool known(const at::Tensor& tensor) { return static_cast<bool>(find(tensor)); }
  bool stores(const at::Tensor& tensor) const {
    return by_storage_.count(tensor.storage().unsafeGetStorageImpl()) > 0;
  }
  // Makes `tensor` the base of its storage.
  void define(const at::Tensor& tensor, ValueId value);
  // A change of this parameter changes the loss as far as autograd follows.
  void train(ValueId parameter) { trained_.insert(parameter); }
  ValueId value_of(const at::Tensor& tensor, const std::string& reader);
  // Whether a defined tensor was written to since.
  bool changed(const at::Tensor& tensor);
  // Whether it follows from constants alone.
  bool fixed(const at::Tensor& tensor);
  static std::vector<std::string> refused();

 private:
  Graph& graph() { return result.graph; }
  static const std::unordered_map<std::string, Handler>& handlers();
  const OpInfo& info_of(const c10::OperatorHandle& handle);
  const OpInfo* functional_of(const OpInfo& info);

  ValueId emit(const std::string& op, std::vector<Arg> args, const TensorSpec& spec);
  Place find(const at::Tensor& tensor);
  ValueId value_at(Place place);
  void write(Place place, ValueId value);
  ValueId undo(const View& view, const View& parent, ValueId old_parent, ValueId value);
  int add_view(Stored* stored, int parent, Geometry geometry, ViewOp op);
  bool varies(ValueId value);
  at::Tensor detached(const at::Tensor& tensor, const std::string& reader);
  at::Tensor adopt(const at::Tensor& tensor, const std::string& reader, bool fresh = false);
  at::Tensor adopt_operand(const OpInfo& info, const c10::IValue* args, size_t i);
  void check_outside(const at::Tensor& tensor, const std::string& reader) const;
  // A new contiguous Meta tensor of this value.
  at::Tensor made(ValueId value);

  Arg to_arg(const OpInfo& info, const OperatorArg& schema, const c10::IValue& value);
  std::vector<Arg> to_args(const OpInfo& info, const c10::IValue* values);
  // Runs an op on the Meta device, or its shape function, or on the CPU with other numbers.
  std::vector<at::Tensor> evaluate(const OpInfo& info, Node* node, Stack* stack);
  // Records a functional call; its arguments on the stack are replaced by its results.
  std::vector<at::Tensor> record(const OpInfo& info, Stack* stack);
  void record_views(const OpInfo& info, Node node, Place parent,
                    const std::vector<at::Tensor>& outputs);
  ViewOp canonical_view(const Node& node, const Geometry& parent, const Geometry& out, size_t index,
                        const std::vector<at::Tensor>& outputs);
  ValueId cast(ValueId value, const TensorSpec& spec);

  void mutate(const OpInfo& info, Stack* stack);
  void as_strided(const OpInfo& info, Stack* stack);
  bool find_like(Stored* stored, const Geometry& wanted);
  bool unflatten(Stored* stored, const Geometry& wanted);
  bool read_strided(Stored* stored, const Geometry& wanted);
  void batch_norm(const OpInfo& info, Stack* stack);
  void batch_norm_backward(const OpInfo& info, Stack* stack);
  void copy(const OpInfo& info, Stack* stack);
  void fill(const OpInfo& info, Stack* stack);
  void clone(const OpInfo& info, Stack* stack);
  void to_copy(const OpInfo& info, Stack* stack);
  void factory(const OpInfo& info, Stack* stack);
  void empty_like(const OpInfo& info, Stack* stack);
  void full(const OpInfo& info, Stack* stack);
  void index(const OpInfo& info, Stack* stack);
  void index_put(const OpInfo& info, Stack* stack);
  void lift_fresh(const OpInfo& info, Stack* stack);
  void zero_tensor(const OpInfo& info, Stack* stack);
  void same_on_meta(const OpInfo& info, Stack* stack);
  void determinant(const OpInfo& info, Stack* stack);
  void solve(const OpInfo& info, Stack* stack);
  void ctc_loss(const OpInfo& info, Stack* stack);
  void read_number(const OpInfo& info, Stack* stack);
  void refuse_value(const OpInfo& info, Stack* stack);
  void refuse_storage(const OpInfo& info, Stack* stack);

  std::unordered_map<const void*, OpInfo> infos_;  // by the address of the schema
  std::vector<std::unique_ptr<Stored>> stored_;
  std::unordered_map<const c10::StorageImpl*, Stored*> by_storage_;
  struct Adopted {
    at::Tensor from, meta;  // a tensor from outside, held so that its address stays its own
  };
  std::unordered_map<const c10::StorageImpl*, std::vector<Adopted>> adopted_;
  std::unordered_map<const c10::StorageImpl*, std::string> owned_;  // names, by memory
  std::set<ValueId> trained_;
  std::vector<bool> varies_;            // [value]
  std::map<ValueId, ValueId> stopped_;  // a value, and the same as autograd does not follow it
  size_t walked_ = 0;                   // nodes that varies_ knows of
};

}  // namespace motley::recording
