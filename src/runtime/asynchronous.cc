// Collectives that travel while the executor computes: each is started where it stands in the
// program and waited for where its result is read.
#include <ATen/ATen.h>

#include "comm/background.h"
#include "runtime/instruction.h"

namespace motley {

// A collective on its way.
struct Executor::Travelling {
  const Instruction* in = nullptr;
  at::Tensor operand, result;
  int64_t number = 0;
};

double now_seconds() {
  using Clock = std::chrono::steady_clock;
  return std::chrono::duration<double>(Clock::now().time_since_epoch()).count();
}

void Executor::start(const Instruction& in) {
  auto travelling = std::make_shared<Travelling>();
  travelling->in = &in;
  const bool bucket = in.kind == Instruction::Kind::bucket;
  if (bucket && in.steps.size() > 1) {
    std::vector<at::Tensor> flat;
    for (const Step& s : in.steps) flat.push_back(values_[slot(s.value, s.from)].reshape({-1}));
    travelling->operand = at::cat(flat);
  } else {
    at::Tensor& operand = values_[slot(in.steps[0].value, in.steps[0].from)];
    travelling->operand = in.last ? std::move(operand) : operand;
  }
  travelling->number = background_->start([this, t = travelling.get(), bucket] {
    at::Tensor operand = std::move(t->operand);
    background_->keep(operand);
    if (bucket) {
      t->result = own_elements(operand, t->in->last || t->in->steps.size() > 1);
      communicator_.all_reduce(t->result);
    } else {
      t->result = converted(*t->in, operand);
    }
  });
  for (const Step& s : in.steps) travelling_[slot(s.value, s.to)] = travelling;
}

void Executor::arrive(int slot_of_result) {
  if (slot_of_result < 0 || travelling_.empty() || !travelling_[slot_of_result]) return;
  const std::shared_ptr<Travelling> t = travelling_[slot_of_result];
  if (options_.before) options_.before(false);
  const double begin = now_seconds();
  background_->wait(t->number);
  waited_ += now_seconds() - begin;
  if (options_.after) options_.after(false, nullptr);
  background_->keep_for_caller(t->result);
  int64_t at = 0;
  for (const Step& s : t->in->steps) {
    const int to = slot(s.value, s.to);
    if (t->in->kind == Instruction::Kind::bucket) {
      const TensorSpec& spec = theory_.graph().spec(s.value);
      values_[to] = t->result.view({-1}).narrow(0, at, spec.numel()).reshape(spec.shape);
      at += spec.numel();
    } else {
      values_[to] = t->result;
    }
    travelling_[to] = nullptr;
    if (options_.observe) options_.observe(s.value, s.to, values_[to]);
  }
}

void Executor::arrive_for(const Instruction& in) {
  for (int s : in.operands) arrive(s);
  for (const Step& s : in.steps) arrive(slot(s.value, s.from));
  if (!in.meets || background_->idle()) return;
  if (options_.before) options_.before(false);
  const double begin = now_seconds();
  background_->wait_all();  // what others do inside an operator comes behind
  waited_ += now_seconds() - begin;
  if (options_.after) options_.after(false, nullptr);
}

void Executor::arrive_all() {
  for (size_t s = 0; s < travelling_.size(); ++s) arrive(static_cast<int>(s));
}

Executor::Communication Executor::communication() {
  return {blocked_ + hidden_ + (background_ ? background_->worked() : 0), blocked_ + waited_};
}

Executor::~Executor() {
  if (background_ && !background_->idle()) communicator_.abort();
}

}  // namespace motley
