#include "comm/meeting.h"

#include <fmt/ranges.h>

#include <numeric>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>
#include <torch/csrc/distributed/c10d/TCPStore.hpp>
#include <vector>

#include "comm/store.h"

namespace motley {

namespace {

using StorePointer = c10::intrusive_ptr<c10d::Store>;

// Servers that this process holds; others may need them until it ends.
std::shared_ptr<StoreServer> hold(std::shared_ptr<StoreServer> server) {
  static auto* held = new std::vector<std::shared_ptr<StoreServer>>;
  held->push_back(server);
  return server;
}

StorePointer connect(const Rendezvous& where) {
  const auto nobody = [&](const char* why) -> UserError {
    return user_error("run", "nobody answers at MASTER_ADDR {} port {}{}; is rank 0 running there?",
                      where.host, where.port, why);
  };
  if (!where.of_torch) {
    if (where.rank == 0 && !where.store_outside)
      hold(std::make_shared<StoreServer>(addresses_to_listen(where.host)[0], where.port,
                                         where.token, /*rank0=*/true));
    try {
      return connect_store(where.host, where.port, where.token, where.patience);
    } catch (const std::runtime_error& e) {
      const bool refused = std::string(e.what()).find("token") != std::string::npos;
      // The launcher is there: it is this worker that is cut off.
      if (!refused && where.store_outside && where.numbers.empty())
        throw WorkerMissing(where.rank,
                            fmt::format("[run] rank {} does not reach the launcher at {} port {}",
                                        where.rank, where.host, where.port));
      throw nobody(refused ? " but another program, or a launch with another MOTLEY_TOKEN" : "");
    }
  }
  c10d::TCPStoreOptions options;
  options.port = static_cast<uint16_t>(where.port);
  options.isServer = false;
  options.timeout = where.patience;
  options.waitWorkers = false;
  try {
    return c10::make_intrusive<c10d::TCPStore>(where.host, options);
  } catch (const std::exception&) {
    throw nobody("");
  }
}

// Has the workers of a launch watched: by whoever holds the store, or by rank 0 where that is
// torch's.
void start_watch(const Rendezvous& where, c10d::Store& store) {
  try {
    if (!where.of_torch) return Watch::start(where.rank, where.host, where.port, where.token);
    std::string row;
    if (where.rank == 0) {
      const std::string token = random_token();
      const auto server = hold(std::make_shared<StoreServer>(addresses_to_listen(where.host)[0], 0,
                                                             token, /*rank0=*/true));
      row = fmt::format("{} {}", server->port(), token);
      store.set("/watch", std::vector<uint8_t>(row.begin(), row.end()));
    } else {
      const std::vector<uint8_t> raw = store.get("/watch");
      row.assign(raw.begin(), raw.end());
    }
    const size_t space = row.find(' ');
    Watch::start(where.rank, where.host, std::atoi(row.c_str()), row.substr(space + 1));
  } catch (const std::runtime_error& e) {
    std::fprintf(stderr,
                 "motley: rank %d cannot be watched by rank 0 at %s (%s): if a worker is stopped, "
                 "others wait %lld minutes for it\n",
                 where.rank, where.host.c_str(), e.what(),
                 static_cast<long long>(kCollectiveTime.count()));
  }
}

}  // namespace

void check_set_up(const Rendezvous& where, const char* what,
                  std::chrono::steady_clock::time_point until) {
  if (const std::string lost = Watch::lost(); !lost.empty())
    throw PeerLost(fmt::format("[run] rank {} lost {} while {}: {}", where.number(where.rank), lost,
                               what, Watch::reason()));
  if (const std::string ended = Watch::ended(); !ended.empty())
    throw PeerLost(fmt::format("[run] rank {} lost {} while {}: it ended or was killed",
                               where.number(where.rank), ended, what));
  if (std::chrono::steady_clock::now() > until)
    throw user_error("run",
                     "rank {} waited {} s in vain while {}; is every worker running, and "
                     "are their ports open to each other?",
                     where.number(where.rank), where.patience.count(), what);
}

namespace {

WorkerMissing in_vain(const Rendezvous& where, const std::vector<int>& missing) {
  return {
      missing.empty() ? -1 : missing[0],
      fmt::format("[run] rank {} waited {} s in vain for rank {} of {} workers; start all of them",
                  where.number(where.rank), where.patience.count(), fmt::join(missing, ", "),
                  where.size)};
}

// What keys of this start of the workers begin with. torchrun keeps its store when it starts workers
// again, with keys of those before, and machines count differently how often that was. So rank 0
// writes a name down, the others answer it with names of their own, and go on when it repeats them.
// Whoever read the name of a start before is not answered, and reads again.
std::string name_of_start(const Rendezvous& where, c10d::Store& store) {
  const auto write = [&](const std::string& key, const std::string& text) {
    store.set("motley/" + key, std::vector<uint8_t>(text.begin(), text.end()));
  };
  const auto read = [&](const std::string& key) {
    if (!store.check({"motley/" + key})) return std::string();
    const std::vector<uint8_t> raw = store.get("motley/" + key);
    return std::string(raw.begin(), raw.end());
  };
  const std::string mine = random_token();
  const auto until = std::chrono::steady_clock::now() + where.patience;
  const auto pause = [&](const std::vector<int>& missing) {
    if (std::chrono::steady_clock::now() > until) throw in_vain(where, missing);
    std::this_thread::sleep_for(std::chrono::milliseconds(2));
  };
  if (where.rank == 0) {
    write("start", mine);
    std::vector<int> missing(static_cast<size_t>(where.size) - 1);
    std::iota(missing.begin(), missing.end(), 1);
    while (true) {
      std::erase_if(missing, [&](int rank) {
        const std::string theirs = read(fmt::format("{}/{}", mine, rank));
        if (!theirs.empty()) write(fmt::format("{}/{}/known", mine, rank), theirs);
        return !theirs.empty();
      });
      if (missing.empty()) return "/" + mine;
      pause(missing);
    }
  }
  for (std::string answered;; pause({0})) {
    const std::string name = read("start");
    if (!name.empty() && name != answered) write(fmt::format("{}/{}", name, where.rank), mine);
    answered = name;
    if (!name.empty() && read(fmt::format("{}/{}/known", name, where.rank)) == mine)
      return "/" + name;
  }
}

StorePointer meet_at(const Rendezvous& where, const std::string& backend) {
  const StorePointer tcp = connect(where);
  static std::string start;  // of this process; the first to meet are all workers
  if (where.of_torch && where.numbers.empty() && start.empty()) start = name_of_start(where, *tcp);
  auto store = c10::make_intrusive<c10d::PrefixStore>("motley" + start + where.prefix, tcp);

  auto key = [](int r) { return fmt::format("/here/{}", r); };
  store->set(key(where.rank), std::vector<uint8_t>(backend.begin(), backend.end()));
  std::vector<std::string> all;
  for (int r = 0; r < where.size; ++r) all.push_back(key(r));
  try {
    store->wait(all, where.patience);
  } catch (const std::exception&) {
    std::vector<int> missing;
    for (int r = 0; r < where.size; ++r)
      if (!store->check({key(r)})) missing.push_back(where.number(r));
    throw in_vain(where, missing);
  }
  for (int r = 0; r < where.size; ++r) {
    const std::vector<uint8_t> raw = store->get(key(r));
    const std::string theirs(raw.begin(), raw.end());
    if (theirs != backend)
      throw user_error("run", "rank {} uses {}, but rank {} {}; give all workers the same --device",
                       where.number(where.rank), backend, where.number(r), theirs);
  }
  return store;
}

}  // namespace

c10::intrusive_ptr<c10d::Store> meet(const Rendezvous& where, const std::string& backend) {
  return set_up<StorePointer>(where, "meeting the others", [where, backend] {
    StorePointer store = meet_at(where, backend);
    if (where.numbers.empty() && where.size > 1) start_watch(where, *store);
    return store;
  });
}

PeerLost peer_lost(int rank, const std::string& who, const char* what,
                   const std::exception& error) {
  const std::string text = error.what();
  // Whoever is told so closes its connections; the others learn why in the same moment.
  std::string lost = Watch::lost();
  for (int i = 0; i < 5 && lost.empty(); ++i) {
    std::this_thread::sleep_for(std::chrono::milliseconds(20));
    lost = Watch::lost();
  }
  if (!lost.empty())
    return PeerLost(
        fmt::format("[run] rank {} lost {} during {}: {}", rank, lost, what, Watch::reason()));
  const bool closed = text.find("losed") != std::string::npos ||
                      text.find("reset") != std::string::npos ||
                      text.find("roken pipe") != std::string::npos;
  if (closed)
    return PeerLost(
        fmt::format("[run] rank {} lost {} during {}: it ended or was killed", rank, who, what));
  if (text.find("imed out") != std::string::npos)
    return PeerLost(fmt::format("[run] rank {} got no answer from {} during {} in {} minutes", rank,
                                who, what, kCollectiveTime.count()));
  return PeerLost(
      fmt::format("[run] rank {}: {} failed: {}", rank, what, text.substr(0, text.find('\n'))));
}

}  // namespace motley
