// Collectives that travel while the executor computes: each is started where it stands in the
// program and waited for where its result is read.
#include <ATen/ATen.h>
#include <c10/core/Event.h>
#include <c10/core/StreamGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include <optional>

#include "comm/background.h"
#include "runtime/instruction.h"

namespace motley {

// A collective on its way. On a CUDA device it runs on a stream beside that of the computation:
// `ready` is when its operand is there, `done` when its result is.
struct Executor::Travelling {
  const Instruction* in = nullptr;
  at::Tensor operand, result;
  int64_t number = 0;
  std::optional<c10::Event> ready, done;
};

double now_seconds() {
  using Clock = std::chrono::steady_clock;
  return std::chrono::duration<double>(Clock::now().time_since_epoch()).count();
}

namespace {

c10::Stream current_stream(at::Device device) {
  return c10::impl::VirtualGuardImpl(device.type()).getStream(device);
}

}  // namespace

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
  const at::Device device = options_.device;
  if (device.is_cuda()) {
    travelling->ready.emplace(device.type());
    travelling->ready->record(current_stream(device));
    if (!stream_)
      stream_ = std::make_shared<c10::Stream>(
          c10::impl::VirtualGuardImpl(device.type()).getStreamFromGlobalPool(device));
  }
  travelling->number = background_->start([this, t = travelling.get(), bucket] {
    std::optional<c10::StreamGuard> guard;
    if (t->ready) {
      guard.emplace(*stream_);
      t->ready->block(*stream_);
    }
    at::Tensor operand = std::move(t->operand);
    if (t->ready) operand.record_stream(*stream_);
    if (bucket) {
      t->result = own_elements(operand, t->in->last || t->in->steps.size() > 1);
      communicator_.all_reduce(t->result);
    } else {
      t->result = converted(*t->in, operand);
    }
    if (t->ready) {
      t->done.emplace(options_.device.type());
      t->done->record(*stream_);
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
  if (t->done) {
    const c10::Stream stream = current_stream(options_.device);
    t->done->block(stream);
    t->result.record_stream(stream);
  }
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
  return {blocked_ + (background_ ? background_->worked() : 0), blocked_ + waited_};
}

Executor::~Executor() {
  if (background_ && !background_->idle()) communicator_.abort();
}

}  // namespace motley
