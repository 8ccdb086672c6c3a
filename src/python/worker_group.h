// The workers that a launcher started, as one process of Python sees them: over what their tensors go, and what
// they tell one another.
#pragma once

#include <ATen/ATen.h>

#include <algorithm>
#include <atomic>
#include <functional>
#include <map>
#include <memory>
#include <numeric>
#include <optional>
#include <set>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "cluster/cluster.h"
#include "comm/alone.h"
#include "comm/devices.h"
#include "comm/gloo.h"
#include "comm/launch.h"
#include "comm/mixed.h"
#include "comm/process_group.h"
#include "comm/staged.h"
#include "comm/store.h"
#include "comm/subgroup.h"
#include "comm/texts.h"
#include "core/error.h"
#include "runtime/emulate.h"

namespace motley::python {

constexpr int kIdleTag = 1 << 20;  // of messages from and to idle workers
constexpr int kDigestTag = kIdleTag + 1;
constexpr int kPartTag = kIdleTag + 2;  // of what a part of the cluster tells itself

// Makes process groups of torch.distributed: of these ranks of the launch, over a backend; called by
// all of them. The names under which c10d knows them: of collectives, of messages to higher and to
// lower ranks.
using MakeNamed = std::function<std::vector<std::string>(const std::vector<int>& ranks,
                                                         const std::string& backend)>;

// The workers that a launcher started; this process alone if none did. They always have a group of
// gloo on the CPU, for what they tell one another; tensors of plans take it too, unless they are
// on a CUDA device or another backend is asked for.
class WorkerGroup {
 public:
  // `store_outside`: torch.distributed holds the store at MASTER_PORT. `order`: the launcher's ranks in
  // the order that they have here; empty: their own.
  WorkerGroup(bool store_outside, bool cuda, MakeNamed make, const std::vector<int>& order)
      : make_(std::move(make)) {
    std::optional<Rendezvous> where = rendezvous_from_environment();
    if (!where) {
      store_ = std::make_unique<RendezvousStore>(0);
      where = store_->member(0, 1);
    } else if (store_outside && !where->store_outside) {
      where->store_outside = where->of_torch = true;
    }
    if (cuda)
      device_ = at::Device(at::kCUDA, static_cast<c10::DeviceIndex>(cuda_device_of(*where)));
    else
      keep_freed_memory();  // as in the workers of motley run
    where_ = *where;
    static std::atomic<int> made{0};  // by this process, as by the others
    if (const int number = made++; number > 0)
      where_ = part_of(*where, order.empty() ? everyone() : order, fmt::format("/group{}", number));
    all_ = join(where_);
    over(&all_, everyone());
  }
  // From now on tensors go over groups of this backend; collective, before any step. `chosen`: whatever
  // a cluster file says of the whole.
  void use(const std::string& backend, bool chosen) {
    backend_ = backend;
    chosen_ = chosen;
    over(&all_, everyone());
  }
  // What every worker says, by rank.
  std::vector<std::string> gather(const std::string& mine) {
    return gather_texts(*all_.control, mine);
  }
  // Adds up what the workers give, on the CPU.
  void tell(at::Tensor tensor) { all_.control->all_reduce(tensor); }
  // On the device.
  Communicator* operator->() { return all_.used(); }
  at::Device device() const { return device_; }
  // [rank] The connected socket to each peer, -1 where there is none.
  std::vector<int> sockets() const { return all_.control->sockets(); }
  // The same; none where tensors do not go over them.
  std::vector<int> sockets_of_tensors() const {
    return all_.over.used() == nullptr ? sockets() : std::vector<int>{};
  }
  // Over which tensors go, with what it turned out to be able to do.
  Backend backend() const {
    Backend used = backend_named(backend_.empty() ? "gloo" : backend_);
    if (!used.known && where_.size > 1) {
      used.messages = all_.used()->has_messages();
      used.all_to_all = all_.used()->has_all_to_all();
    }
    return used;
  }
  // At the end of the process, when no worker asks for anything any more.
  void close() {
    going_.clear();
    exchanged_.clear();
    all_.control->close();
    for (auto& [_, part] : parts_) part.control->close();
  }
  // The cluster, whose devices talk over that.
  std::shared_ptr<Cluster> cluster_over(const Cluster& cluster) const {
    auto known = std::make_shared<Cluster>(cluster);
    Backend &said = known->groups[0].backend, used = backend();
    if (said.name == used.name) {  // the file may say more of one that is not in the table
      said.messages = used.known || where_.size == 1 ? said.messages : used.messages;
      said.all_to_all = used.known || where_.size == 1 ? said.all_to_all : used.all_to_all;
    } else {
      said = used;
    }
    return known;
  }
  // The group of workers with these ranks, ascending; nullptr if this worker is none of them.
  // Collective among them; one that has been joined stays. Parts of the cluster that have a backend
  // of their own talk over it.
  Communicator* among(const std::vector<int>& ranks, const Cluster& cluster) {
    Joined* part = joined(ranks);
    if (part == nullptr) return nullptr;
    return mix(part, ranks, cluster);
  }
  // All workers, those of one machine over a backend of theirs. Collective.
  Communicator* mixed_in(const std::string& machine, const std::string& backend) {
    std::string text = "name: machines\nlink: {bandwidth: 1 GB/s}\n";
    const std::vector<std::string> all = gather_texts(*all_.used(), machine);
    std::vector<std::pair<std::string, int>> runs;
    for (const std::string& one : all) {
      if (runs.empty() || runs.back().first != one) runs.emplace_back(one, 0);
      ++runs.back().second;
    }
    if (std::set<std::string>(all.begin(), all.end()).size() < runs.size())
      throw user_error(
          "discover",
          "ranks of one machine are not neighbours; start the workers machine by machine, or "
          "leave out --inside");
    text += "groups:\n";
    for (const auto& [_, count] : runs)
      text += fmt::format(
          "  - {{link: {{bandwidth: 1 GB/s}}, backend: {}, devices: [{{type: T4, count: {}}}]}}\n",
          backend, count);
    return among(everyone(), parse_cluster(text, "machines"));
  }
  // Limits the bandwidth between these ranks, whose devices are those of the cluster.
  std::string limit_bandwidth(const Cluster& cluster, const std::vector<int>& ranks) {
    const Joined* part = joined(ranks);
    if (part == nullptr) return "off";
    if (part->over.used() != nullptr)
      throw user_error("python",
                       "emulate works on the CPU over gloo; give it without device= and backend=");
    return emulate_links(*part->control, cluster);
  }

  // A step in which only the workers with `ranks` compute. Whoever is idle waits for its loss, and
  // the first of `ranks` does not begin before all have come: so nobody is a step ahead of an idle
  // worker that asks for the state. All of it is nothing where no worker is idle.
  void begin_step(const std::vector<int>& ranks) {
    if (all_.control->rank() != ranks[0]) return;
    std::vector<std::unique_ptr<Message>> coming;
    std::vector<at::Tensor> here;
    for (int rank : idle(ranks)) {
      here.push_back(at::empty({1}, at::kByte));
      coming.push_back(all_.control->receive(here.back(), rank, kIdleTag));
    }
    for (auto& message : coming) message->wait();
    for (auto& message : going_) message->wait();
    going_.clear();
  }
  // Every worker gives a number and gets that of the worker before it in the ring of ranks, so that
  // any two that differ are noticed. The numbers travel between the two calls, and a worker that
  // waits in the second one needs nothing of the others but their first.
  void begin_exchange(int64_t number) {
    const int size = all_.control->size(), rank = all_.control->rank();
    before_ = at::full({1}, number, at::TensorOptions(at::kLong));
    exchanged_.clear();
    if (size == 1) return;
    mine_ = before_.clone();
    exchanged_.push_back(all_.control->receive(before_, (rank + size - 1) % size, kDigestTag));
    exchanged_.push_back(all_.control->send(mine_, (rank + 1) % size, kDigestTag));
  }
  int64_t end_exchange() {
    for (auto& message : exchanged_) message->wait();
    exchanged_.clear();
    return before_.item<int64_t>();
  }
  // The loss, which the workers with `ranks` give, everywhere. It is sent and not waited for.
  at::Tensor end_step(const std::vector<int>& ranks, const at::Tensor& loss, at::ScalarType type) {
    const std::vector<int> others = idle(ranks);
    const int rank = all_.control->rank();
    if (others.empty()) return loss.to(type).reshape({});
    at::Tensor value = at::zeros({1}, at::TensorOptions(at::kDouble));
    if (loss.defined()) value.fill_(loss.item<double>());
    if (rank == ranks[0]) {
      for (int other : others) going_.push_back(all_.control->send(value, other, kIdleTag));
    } else if (std::find(others.begin(), others.end(), rank) != others.end()) {
      const auto here = all_.control->send(at::zeros({1}, at::kByte), ranks[0], kIdleTag);
      all_.control->receive(value, ranks[0], kIdleTag)->wait();
      here->wait();
    }
    return at::scalar_tensor(value.item<double>(), type).to(device_);
  }

 private:
  // Some workers over a backend of torch.distributed; copies to the CPU around it where it does not
  // reach the device.
  struct Over {
    std::unique_ptr<Communicator> groups, copies;
    Communicator* used() const { return copies ? copies.get() : groups.get(); }
  };
  // A group and a part of the cluster in it.
  struct Mixed {
    std::unique_ptr<Communicator> control;
    Over part;
    std::unique_ptr<Communicator> both;
  };
  struct Joined {
    std::unique_ptr<ProcessCommunicator> control;
    Over over;  // null: control
    // By the backend of the group around it, its own, and members.
    std::map<std::tuple<const Communicator*, std::string, std::vector<int>>, Mixed> mixed;
    Communicator* used() const { return over.used() ? over.used() : control.get(); }
  };
  Joined join(const Rendezvous& where) {
    Joined made;
    made.control = join_group(where);
    return made;
  }
  std::vector<int> everyone() const {
    std::vector<int> ranks(static_cast<size_t>(where_.size));
    std::iota(ranks.begin(), ranks.end(), 0);
    return ranks;
  }
  Over made_by_torch(const std::vector<int>& ranks, const std::string& backend,
                     Communicator* control) {
    Watch::exit_when_lost();  // what waits for a lost worker in another backend may wait for ever
    OverProcessGroups groups;
    groups.ranks = ranks;
    groups.backend = backend_named(backend);
    const bool reaches = device_.is_cpu() ? groups.backend.cpu : groups.backend.cuda;
    if (!reaches && device_.is_cpu())
      throw user_error("python",
                       "the backend {} has no tensors on the CPU; give device='cuda', or another "
                       "backend in distribute() or the cluster file",
                       backend);
    if (reaches) groups.device = device_;
    groups.control = control;
    groups.number = where_.rank;
    groups.make = [this, backend](const std::vector<int>& of) {
      const std::vector<std::string> names = make_(of, backend);
      ProcessGroups made;
      made.collectives = group_named(names.at(0));
      made.up = group_named(names.at(1));
      made.down = group_named(names.at(2));
      return made;
    };
    Over over{communicator_over(std::move(groups)), nullptr};
    if (!reaches) over.copies = staged(*over.groups, device_);
    return over;
  }
  void over(Joined* joined, const std::vector<int>& ranks) {
    if (device_.is_cuda() && ranks.size() == 1)
      joined->over.copies = alone_on(device_);
    else if (!backend_.empty() && ranks.size() > 1)
      joined->over = made_by_torch(ranks, backend_, joined->control.get());
    else if (device_.is_cuda())
      joined->over.copies = staged(*joined->control, device_);
  }
  // The group with the workers of this one's parts of the cluster, outer ones first, over what its
  // file says; the group itself if it says nothing. What the file says of the whole is the launch's.
  Communicator* mix(Joined* joined, const std::vector<int>& ranks, const Cluster& cluster) {
    const int me = joined->control->rank();
    Communicator* used = joined->used();
    std::string above = backend().name;
    for (const Group& group : cluster.groups) {
      const std::string& name = group.backend.name;
      const bool whole = !group.parent.valid() && chosen_;
      if (whole || name.empty() || name == above || group.device_count < 2 ||
          me < group.first_device || me >= group.first_device + group.device_count)
        continue;
      above = name;
      std::vector<int> members, of_launch;
      for (int d = group.first_device; d < group.first_device + group.device_count; ++d) {
        members.push_back(d);
        of_launch.push_back(ranks[static_cast<size_t>(d)]);
      }
      Mixed& made = joined->mixed[{used, name, members}];
      if (made.both == nullptr) {
        made.control = subgroup(*joined->control, members, kPartTag);
        made.part = made_by_torch(of_launch, name, made.control.get());
        made.both = mixed(*used, std::move(members), *made.part.used());
      }
      used = made.both.get();
    }
    return used;
  }
  Joined* joined(const std::vector<int>& ranks) {
    if (static_cast<int>(ranks.size()) == where_.size) return &all_;
    if (std::find(ranks.begin(), ranks.end(), where_.rank) == ranks.end()) return nullptr;
    auto it = parts_.find(ranks);
    if (it == parts_.end()) {
      const std::string name = fmt::format("/devices_{}", fmt::join(ranks, "_"));
      it = parts_.emplace(ranks, join(part_of(where_, ranks, name))).first;
      over(&it->second, ranks);
    }
    return &it->second;
  }
  std::vector<int> idle(const std::vector<int>& ranks) const {
    std::vector<int> others;
    for (int rank = 0; rank < where_.size; ++rank)
      if (std::find(ranks.begin(), ranks.end(), rank) == ranks.end()) others.push_back(rank);
    return others;
  }

  std::string backend_;
  bool chosen_ = false;
  MakeNamed make_;
  std::unique_ptr<RendezvousStore> store_;
  Rendezvous where_;
  at::Device device_ = at::kCPU;
  Joined all_;
  std::map<std::vector<int>, Joined> parts_;     // by ranks
  std::vector<std::unique_ptr<Message>> going_;  // losses, to idle workers
  at::Tensor mine_, before_;                     // numbers of an exchange
  std::vector<std::unique_ptr<Message>> exchanged_;
};

}  // namespace motley::python
