#include "formats.h"

#include <poll.h>
#include <sys/socket.h>

#include <cerrno>
#include <optional>

#include "cluster/profile.h"
#include "cluster/tariff.h"
#include "comm/line.h"
#include "comm/store.h"
#include "core/error.h"
#include "core/file.h"
#include "core/units.h"
#include "discover/discover.h"
#include "export/plan_files.h"
#include "graph/file.h"
#include "plan/plan.h"
#include "readers/assemble.h"
#include "readers/huggingface.h"
#include "readers/layer_times.h"
#include "readers/machines.h"
#include "readers/nccl.h"
#include "readers/planners.h"
#include "readers/text.h"
#include "runtime/checkpoint.h"
#include "shard/theory.h"
#include "sim/simulate.h"

namespace motley {

namespace {

constexpr const char* kName = "mutant";
constexpr milliseconds kPatience{30000};  // fuzzing at the lowest priority waits for a processor

void read_cluster(const std::string& text) {
  const Cluster cluster = parse_cluster(text, kName);
  parse_cluster(to_yaml(cluster), "mutant written again");
}

void read_plan(const std::string& text) {
  const Plan plan = parse_plan(text, kName);
  const std::vector<std::string> problems = check(plan);
  // Where only memory is too small, as check() says last, a plan can be described.
  if (!problems.empty() &&
      (!problems.front().starts_with("device ") || !check(plan, false).empty()))
    return;
  describe(plan);
  if (problems.empty()) simulate(plan);
}

void read_graph(const std::string& text) {
  const GraphFile file = parse_graph_file(text, kName);
  for (int64_t samples : {file.batch, int64_t{7}, int64_t{1} << 40}) {
    try {
      const Theory theory(file.at(samples));
    } catch (const UserError&) {
      if (samples == file.batch) throw;
    }
  }
}

void read_profile(const std::string& text) {
  const Profile profile = parse_profile(text, kName);
  Cluster cluster = flat_cluster({{.name = "fast", .flops = 1e12, .memory = 1e9}}, {2},
                                 {LinkKind::switched, 1e9, 1e-6});
  apply(profile, kName, &cluster);
}

void read_config(const std::string& text) {
  readers::HuggingFaceModel(parse_json(text, kName), kName, 0, 0).at(4);
}

// Of `motley cluster`: one of its sources beside a hostfile.
template <std::optional<readers::Source> readers::Sources::*field>
void read_source(const std::string& text) {
  readers::Sources sources;
  if (field == &readers::Sources::query)  // as many GPUs as are listed
    sources.hostfile = readers::Source{"hosts", "a\n"};
  else if (field != &readers::Sources::hostfile)
    sources.hostfile = readers::Source{"hosts", "a slots=8 type=V100-16GB\nb slots=8\n"};
  sources.*field = readers::Source{kName, text};
  readers::assemble(sources);
}

void read_nccl(const std::string& text) {
  const readers::NcclRun run = readers::parse_nccl(text, kName);
  if (!run.points.empty()) readers::fit(run);
}

// Of a model of one product, on the devices that the small files in tests/corpus are of.
void read_plan_file(const std::string& text) {
  static const auto step = std::make_shared<planner::BatchStep>(
      parse_graph(read_file(std::string(MOTLEY_SOURCE_DIR) + "/tests/data/graphs/linear.txt"),
                  "linear.txt"),
      32);
  static const Cluster cluster = load_cluster("local-mixed-4");
  planner::PlanOptions options;
  options.batch = 32;
  const std::string name = kName;
  const Json json = parse_json(text, name);
  const PlanFile file = plan_reader_of(json, name).read({name, json, cluster, step, options});
  MOTLEY_CHECK(check(*file.plan, false).empty());
}

// Of the kind that it looks like: names of files say over which machines they were measured.
void read_layers(const std::string& text) {
  if (text.find("overlap") != std::string::npos)
    readers::parse_overlap(text, kName);
  else
    readers::parse_layer_times(text, "computation_profiling_bf16_x.json");
}

void read_planners(const std::string& text) {
  const bool galvatron = text.find("_size_") != std::string::npos;
  const char* name = galvatron ? "allreduce_bandwidth_2nodes_8gpus_per_node.json" : "intra_8.json";
  for (const readers::NcclRun& run : readers::parse_communication(text, name))
    if (!run.points.empty()) readers::fit(run);
}

// libtorch refuses with other types.
void read_pieces_of(const std::string& bytes) {
  try {
    read_archive(bytes);
  } catch (const InternalError&) {
    throw;
  } catch (const std::runtime_error& e) {
    const std::string why = e.what();
    throw UserError(why.substr(0, why.find('\n')));
  }
}

// A connection to the store of a run, open for as long as it answers; the store lives on.
void send_to_store(const std::string& bytes, bool known) {
  static const std::string token = random_token();
  static StoreServer server("127.0.0.1", 0, token, true);
  const auto until = Clock::now() + kPatience;
  std::optional<Line> worker;
  Socket stranger;
  if (known) {
    worker.emplace("127.0.0.1", server.port(), token, kPatience);
  } else {
    const Addresses found("127.0.0.1", server.port(), 0);
    stranger = Socket(socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
    int failed = 0;
    do failed = connect(stranger.fd(), found.list->ai_addr, found.list->ai_addrlen);
    while (failed != 0 && errno == EINTR);  // by libFuzzer's timer; it goes on on its own meanwhile
    MOTLEY_CHECK(failed == 0, "errno {}", errno);
  }
  const int fd = known ? worker->fd() : stranger.fd();
  for (size_t at = 0; at < bytes.size();) {
    const ssize_t n = send(fd, bytes.data() + at, bytes.size() - at, MSG_NOSIGNAL);
    if (n > 0) at += static_cast<size_t>(n);
    if (n <= 0 && (errno != EAGAIN || !ready(fd, POLLOUT, until))) break;  // it hung up
  }
  shutdown(fd, SHUT_WR);
  char buffer[1 << 12];
  ssize_t n = 1;
  while (n > 0) {
    MOTLEY_CHECK(ready(fd, POLLIN, until), "the store neither answers nor hangs up");
    n = recv(fd, buffer, sizeof buffer, 0);
  }
  // Others are served as before: a worker after every connection, one that comes new after every 16th.
  static c10::intrusive_ptr<c10d::Store> other;
  static int64_t count = 0;
  if (count++ % 16 == 0) {
    other = connect_store("127.0.0.1", server.port(), token, kPatience);
    other->set("key", std::vector<uint8_t>{1});
    MOTLEY_CHECK(other->get("key") == std::vector<uint8_t>{1});
  }
  other->set("key", std::vector<uint8_t>{2});
}

}  // namespace

const std::vector<Format>& formats() {
  using readers::Sources;
  static const std::vector<Format> table = {
      {"cluster", true, 400, read_cluster},
      {"tariff", true, 300, [](const std::string& text) { parse_tariffs(text, kName); }},
      {"plan", true, 2600, read_plan},
      {"graph", true, 1600, read_graph},
      {"profile", true, 1200, read_profile},
      {"config", true, 400, read_config},
      {"topo", true, 400, read_source<&Sources::topo>},
      {"query", true, 140, read_source<&Sources::query>},
      {"nodes", true, 200, read_source<&Sources::nodes>},
      {"hostfile", true, 100, read_source<&Sources::hostfile>},
      {"topology", true, 250, read_source<&Sources::topology>},
      {"nccl", true, 800, read_nccl},
      {"planners", true, 300, read_planners},
      {"layers", true, 400, read_layers},
      {"autoparallel", true, 700, read_plan_file},
      {"hostlist", true, 100, [](const std::string& text) { readers::hostlist(text, kName); }},
      {"quantity", true, 100,
       [](const std::string& text) { parse_quantity(text, "bandwidth", kName); }},
      {"facts", true, 300, [](const std::string& text) { discover::parse_facts(text, kName); }},
      {"archive", false, 2048, read_pieces_of},
      {"stranger", false, 256, [](const std::string& bytes) { send_to_store(bytes, false); }},
      {"message", false, 256, [](const std::string& bytes) { send_to_store(bytes, true); }},
  };
  return table;
}

const std::function<void(const std::string&)>& reader_of(const std::string& name) {
  for (const Format& format : formats())
    if (format.name == name) return format.read;
  MOTLEY_CHECK(false, "no format {}", name);
  std::abort();
}

}  // namespace motley
