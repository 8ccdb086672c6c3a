// The runtime in groups of real processes: what they compute and train, emulation, failures.
//
// A test that needs processes starts this program again, several times, with the name of a body in
// a variable; Worker.DISABLED_Body runs it.
#include <ATen/ATen.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <netinet/in.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <csignal>
#include <cstdlib>
#include <ctime>
#include <fstream>
#include <functional>
#include <numeric>

#include "comm/gloo.h"
#include "comm/launch.h"
#include "comm/meeting.h"
#include "comm/process_group.h"
#include "comm/staged.h"
#include "core/error.h"
#include "runtime/trainer.h"
#include "uneven.h"

namespace motley {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using Clock = std::chrono::steady_clock;

double since(Clock::time_point start) {
  return std::chrono::duration<double>(Clock::now() - start).count();
}

// ---- What workers do. A body throws if something is wrong.

at::Tensor sample(at::ScalarType type, const std::vector<int64_t>& shape, int64_t salt) {
  int64_t n = std::accumulate(shape.begin(), shape.end(), int64_t{1}, std::multiplies<>());
  return ((at::arange(n, at::kLong) * 7 + salt * 13) % 11).to(type).reshape(shape);
}

// One of everything, with pieces of sizes[r] rows; all numbers are small integers, so every sum is
// exact.
std::vector<at::Tensor> exercise(Communicator& group, at::ScalarType type,
                                 const std::vector<int64_t>& sizes) {
  const int rank = group.rank(), size = group.size();
  std::vector<at::Tensor> results, gathered, scattered, send, receive;
  for (int r = 0; r < size; ++r) {
    scattered.push_back(sample(type, {sizes[r], 3}, rank * size + r));
    send.push_back(sample(type, {sizes[rank] % 100, sizes[r] % 100}, rank * size + r));
    receive.push_back(at::empty({sizes[r] % 100, sizes[rank] % 100}, type));
  }
  for (bool grouped : {false, true}) {
    for (int r = 0; r < size; ++r)
      gathered.push_back(r == rank ? sample(type, {sizes[r], 3}, rank)
                                   : at::empty({sizes[r], 3}, type));
    if (grouped)
      group.all_gather_grouped(gathered);
    else
      group.all_gather(gathered);
    results.insert(results.end(), gathered.begin(), gathered.end());
    gathered.clear();
  }
  group.all_to_all(send, receive);
  results.insert(results.end(), receive.begin(), receive.end());
  if (type == at::kBool) return results;
  results.push_back(group.reduce_scatter(scattered));
  results.push_back(group.reduce_scatter_grouped(scattered));
  for (Reduction reduction : {Reduction::sum, Reduction::max}) {
    at::Tensor t = sample(type, {5}, rank);
    group.all_reduce(t, reduction);
    results.push_back(t);
  }
  group.barrier();
  return results;
}

void equals_the_thread_group(Communicator& group) {
  for (at::ScalarType type : {at::kFloat, at::kDouble, at::kLong, at::kBFloat16, at::kBool})
    for (const std::vector<int64_t>& sizes : std::vector<std::vector<int64_t>>{
             {2, 2, 2, 2}, {5, 0, 1, 3}, {0, 0, 7, 0}, {0, 0, 0, 0}, {9001, 1, 20020, 0}}) {
      const std::vector<at::Tensor> mine = exercise(group, type, sizes);
      std::vector<at::Tensor> expected;
      run_thread_group(group.size(), [&](Communicator& threads) {
        std::vector<at::Tensor> results = exercise(threads, type, sizes);
        if (threads.rank() == group.rank()) expected = results;
      });
      for (size_t i = 0; i < mine.size(); ++i)
        MOTLEY_CHECK(mine[i].equal(expected[i]), "result {} of {}", i, fmt::join(sizes, ","));
    }
}

void collectives(ProcessCommunicator& group) {
  equals_the_thread_group(*staged(group, at::kCPU));
  for (int r = 0; r < group.size(); ++r)
    MOTLEY_CHECK((group.sockets()[r] >= 0) == (r != group.rank()), "socket to {}", r);
  equals_the_thread_group(group);
}

// Ranks 1 and 2 as a group of their own, over sockets of its own.
void part_of_a_group(ProcessCommunicator& group) {
  if (group.rank() == 0) return;
  const auto part = join_group(part_of(*rendezvous_from_environment(), {1, 2}, "/part"));
  MOTLEY_CHECK(part->size() == 2 && part->rank() == group.rank() - 1);
  const int peer = part->sockets()[1 - part->rank()];
  MOTLEY_CHECK(peer >= 0 && peer != group.sockets()[3 - group.rank()], "socket {}", peer);
  equals_the_thread_group(*part);
}

// The communicator over any backend of c10d: gloo, under its own name and as one of which nothing is
// known, not even that it has tags.
void over_c10d(ProcessCommunicator& group) {
  for (const char* name : {"gloo", "unheard-of"}) {
    int made = 0;
    OverProcessGroups over;
    over.backend = backend_named(name);
    over.control = &group;
    for (int r = 0; r < group.size(); ++r) over.ranks.push_back(r);
    over.make = [&](const std::vector<int>& ranks) {
      const auto one = [&] {
        Rendezvous where =
            part_of(*rendezvous_from_environment(), ranks, fmt::format("/{}{}", name, made++));
        const auto store = meet(where, "gloo");
        return process_group_of(gloo_group(store, where), store, at::kCPU);
      };
      ProcessGroups groups;
      groups.collectives = one();
      groups.up = one();
      groups.down = one();
      return groups;
    };
    const auto communicator = communicator_over(std::move(over));
    MOTLEY_CHECK(communicator->rank() == group.rank() && communicator->size() == group.size());
    MOTLEY_CHECK(communicator->has_messages());
    equals_the_thread_group(*communicator);
    const Plan plan = plan_of(kModels[0], 12, uneven_cluster(group.size()));
    const RunReport expected = train(plan, group, {}, 3),
                    report = train(plan, *communicator, {}, 3);
    for (int i = 0; i < 3; ++i)
      MOTLEY_CHECK(std::abs(report.steps[i].loss - expected.steps[i].loss) < 1e-5, "step {}", i);
  }
}

void different_backends(ProcessCommunicator& group) {
  Rendezvous where = *rendezvous_from_environment();
  where.prefix += "/different";
  where.store_outside = true;
  meet(where, group.rank() == 1 ? "nccl" : "gloo");
}

void trains_as_one_device(ProcessCommunicator& group, const std::vector<const char*>& models) {
  for (const char* model : models) {
    const Plan plan = plan_of(model, 12, uneven_cluster(group.size()));
    const RunReport report = train(plan, group, {}, 3);
    if (group.rank() != 0) continue;
    const Plan alone = plan_of(model, 12, uneven_cluster(1));
    const std::vector<StepReport> expected = train_on_threads(alone, {}, 3);
    for (int i = 0; i < 3; ++i)
      MOTLEY_CHECK(std::abs(report.steps[i].loss - expected[i].loss) < 2e-5 * expected[i].loss,
                   "{} step {}: {} is not {}", model, i, report.steps[i].loss, expected[i].loss);
  }
}

void training(ProcessCommunicator& group) {
  std::vector<const char*> models(std::begin(kModels), std::end(kModels));
  models.push_back("bert:layers=1,hidden=16,heads=2,seq=8,vocab=20,dropout=0.2");
  trains_as_one_device(group, models);
}

// The models of HAP's evaluation, small.
void training_hap(ProcessCommunicator& group) {
  trains_as_one_device(group, {"vgg19:width=2,image=32,classes=5",
                               "vit:layers=2,hidden=16,heads=4,image=8,patch=4,classes=5",
                               "bert:layers=2,hidden=16,heads=4,seq=6,vocab=23",
                               "bert-moe:layers=2,hidden=16,heads=4,seq=6,vocab=23,experts=7,"
                               "every=2"});
}

void killed(ProcessCommunicator& group) {
  const Plan plan = plan_of(kModels[0], 12, uneven_cluster(group.size()));
  train(plan, group, {}, 1 << 20, [&](const StepReport& step) {
    if (group.rank() == 1 && step.step == 3) std::raise(SIGKILL);
  });
}

void mistaken(ProcessCommunicator& group) {
  if (group.rank() == 2) throw user_error("test", "rank 2 was given nonsense");
  group.barrier();
}

// What it forked holds its pipe for longer, and nothing else.
void outlived(ProcessCommunicator& group) {
  if (group.rank() == 1 && fork() == 0) {
    const int report = std::atoi(std::getenv("MOTLEY_REPORT_FD"));
    for (int fd = 3; fd < 1024; ++fd)
      if (fd != report) close(fd);
    sleep(5);
    _exit(0);
  }
  if (group.rank() == 1) raise(SIGKILL);
  group.barrier();
}

void stuck_exit(ProcessCommunicator& group) {
  if (group.rank() == 1) _exit(7);
  group.barrier();
}

void paced(ProcessCommunicator& group) {
  // Two and two, 160 Mbit/s between them and much inside.
  Cluster cluster = parse_cluster(R"(
name: two-sites
link: {bandwidth: 160 Mbps, latency: 1 us}
groups:
  - {name: a, link: {bandwidth: 8 Gbps, latency: 1 us}, devices: [{type: cpu-core, count: 2}]}
  - {name: b, link: {bandwidth: 8 Gbps, latency: 1 us}, devices: [{type: cpu-core, count: 2}]}
)",
                                  "test");
  const std::string mode = limit_bandwidth(group, cluster);
  MOTLEY_CHECK(mode == "paced sockets", "{}", mode);
  // The best of a few tries, the same number on every rank: others may take the cores away.
  auto seconds = [&](auto collective, double expected) {
    double best = 1e9;
    for (int attempt = 0; attempt < 5 && best > 1.1 * expected + 0.03; ++attempt) {
      group.barrier();
      const auto start = Clock::now();
      collective();
      at::Tensor took = at::full({1}, since(start), at::kDouble);
      group.all_reduce(took, Reduction::max);
      best = std::min(best, took.item<double>());
    }
    return best;
  };
  const int64_t n = 2 << 20;  // 8 MiB in f32
  const double bytes = 4. * n, bandwidth = 160e6 / 8;
  at::Tensor t = at::ones({n});
  std::vector<at::Tensor> pieces;
  for (int r = 0; r < 4; ++r) pieces.push_back(at::ones({n / 4}));
  std::vector<at::Tensor> skewed;
  for (double share : {0.7, 0.1, 0.1, 0.1})
    skewed.push_back(at::ones({static_cast<int64_t>(share * static_cast<double>(n))}));
  std::vector<at::Tensor> uneven;
  for (double share : {0.4, 0.4, 0.1, 0.1})
    uneven.push_back(at::ones({static_cast<int64_t>(share * static_cast<double>(n))}));
  std::vector<at::Tensor> receive;
  for (int r = 0; r < 4; ++r) receive.push_back(at::empty({n / 4}));
  const double whole = bytes / bandwidth;
  struct Case {
    const char* name;
    std::function<void()> collective;
    double expected;
    double least = 0.9;  // of what is expected
  };
  const Case cases[] = {
      {"all_reduce", [&] { group.all_reduce(t); }, 2 * 0.75 * whole},
      {"all_gather", [&] { group.all_gather(pieces); }, 0.75 * whole},
      {"reduce_scatter", [&] { group.reduce_scatter(pieces); }, 0.75 * whole},
      {"all_to_all", [&] { group.all_to_all(pieces, receive); }, whole},
      // Pieces of unequal size: at most as if all were as large as the largest; rounds overlap.
      {"all_gather, uneven", [&] { group.all_gather(uneven); }, 3 * 0.4 * whole, 0.7},
      // Grouped: what crosses a link is all pieces but one; two chunks fill the chains.
      {"all_gather, skewed, grouped", [&] { group.all_gather_grouped(skewed); },
       0.9 * whole + 2 * 262144 / bandwidth, 0.8},
      {"reduce_scatter, skewed, grouped", [&] { group.reduce_scatter_grouped(skewed); },
       0.9 * whole + 2 * 262144 / bandwidth, 0.8},
  };
  for (const Case& c : cases) {
    const double measured = seconds(c.collective, c.expected);
    if (group.rank() == 0)
      std::fprintf(stderr, "%s: %.3f s, bytes/bandwidth %.3f s\n", c.name, measured, c.expected);
    MOTLEY_CHECK(measured > c.least * c.expected && measured < 1.1 * c.expected + 0.03,
                 "{} took {} s, not {} s", c.name, measured, c.expected);
  }
}

// Seconds of work of this thread so far.
double cpu_time() {
  timespec t;
  clock_gettime(CLOCK_THREAD_CPUTIME_ID, &t);
  return static_cast<double>(t.tv_sec) + 1e-9 * static_cast<double>(t.tv_nsec);
}

// Seconds for which this thread has waited for a core that others had.
double waited() {
  std::ifstream file("/proc/thread-self/schedstat");
  double work, wait;
  MOTLEY_CHECK(file >> work >> wait, "/proc/thread-self/schedstat cannot be read");
  return 1e-9 * wait;
}

// Shares of a core that a padded loop gets: of all the time, and of that without waits for others.
struct CoreShares {
  double of_all, of_own;
};
CoreShares shares_of_loop(double speed, double seconds, const std::function<void()>& op) {
  Padding padding(speed);
  const double cpu_before = cpu_time(), waited_before = waited();
  const auto start = Clock::now();
  while (since(start) < seconds) {
    padding.before(true);
    op();
    padding.after(true);
  }
  padding.before(false);
  const double wall = since(start);
  const double cpu = cpu_time() - cpu_before;
  return {cpu / wall, cpu / (wall - (waited() - waited_before))};
}

// The share is never exceeded, and reached where others leave the core alone.
void padded(ProcessCommunicator& group) {
  const double speed = group.rank() == 0 ? 0.4 : 0.1;
  const at::Tensor a = at::ones({128, 128}), b = at::ones({64});
  const auto product = [&] { at::mm(a, a); };
  const auto sum = [&] { at::add(b, b); };
  for (const std::function<void()>& op : {std::function<void()>(product), {sum}}) {
    double best = 0;
    for (int attempt = 0; attempt < 5 && best < 0.97; ++attempt) {
      const CoreShares shares = shares_of_loop(speed, 0.5, op);
      MOTLEY_CHECK(shares.of_all < 1.03 * speed, "{} of a core, not {}", shares.of_all, speed);
      best = std::max(best, shares.of_own / speed);
    }
    MOTLEY_CHECK(best >= 0.97, "{} of the share {}", best, speed);
  }
}

struct Body {
  const char* name;
  void (*run)(ProcessCommunicator&);
};
const Body kBodies[] = {{"collectives", collectives},
                        {"different_backends", different_backends},
                        {"killed", killed},
                        {"mistaken", mistaken},
                        {"outlived", outlived},
                        {"over_c10d", over_c10d},
                        {"padded", padded},
                        {"paced", paced},
                        {"part_of_a_group", part_of_a_group},
                        {"stuck_exit", stuck_exit},
                        {"training", training},
                        {"training_hap", training_hap}};

TEST(Worker, DISABLED_Body) {
  const char* name = std::getenv("MOTLEY_TEST_BODY");
  ASSERT_NE(name, nullptr) << "started by the other tests only";
  set_threads(1);
  run_worker([&] {
    auto group = join_group(*rendezvous_from_environment());
    for (const Body& body : kBodies)
      if (body.name == std::string(name)) body.run(*group);
    group->barrier();
  });
}

void run_processes(int workers, const std::string& body) {
  LaunchOptions launch;
  launch.arguments = {"--gtest_filter=Worker.DISABLED_Body", "--gtest_also_run_disabled_tests"};
  launch.workers = workers;
  launch.capture = true;
  launch.environment["MOTLEY_TEST_BODY"] = body;
  launch_workers(launch);
}

// ---- Groups of processes

TEST(GlooTest, CollectivesEqualTheThreadGroups) {
  EXPECT_NO_THROW(run_processes(4, "collectives"));
}

TEST(GlooTest, APartOfAGroupIsAGroup) { EXPECT_NO_THROW(run_processes(3, "part_of_a_group")); }

TEST(ProcessGroupTest, AnyBackendEqualsTheThreadGroup) {
  EXPECT_NO_THROW(run_processes(3, "over_c10d"));
}

TEST(ProcessGroupTest, WorkersOfDifferentBackendsAreToldSo) {
  EXPECT_THAT(message_of([] { run_processes(2, "different_backends"); }),
              AllOf(HasSubstr("uses"), HasSubstr("give all workers the same --device")));
}

TEST(GlooTest, PacedTransfersTakeBytesOverBandwidth) { EXPECT_NO_THROW(run_processes(4, "paced")); }

TEST(GlooTest, TheEnvironmentIsChecked) {
  auto with = [](const std::vector<std::pair<const char*, const char*>>& variables) {
    const char* all[] = {"RANK",        "WORLD_SIZE",   "MASTER_ADDR",
                         "MASTER_PORT", "SLURM_PROCID", "SLURM_NTASKS"};
    for (const char* name : all) unsetenv(name);
    for (const auto& [name, value] : variables) setenv(name, value, 1);
    std::string text = message_of([] {
      const auto where = rendezvous_from_environment();
      throw std::runtime_error(
          where ? fmt::format("{}/{} {}:{}", where->rank, where->size, where->host, where->port)
                : "none");
    });
    for (const char* name : all) unsetenv(name);
    return text;
  };
  EXPECT_EQ(with({}), "none");
  EXPECT_EQ(with({{"RANK", "1"},
                  {"WORLD_SIZE", "2"},
                  {"MASTER_ADDR", "10.0.0.1"},
                  {"MASTER_PORT", "29500"}}),
            "1/2 10.0.0.1:29500");
  EXPECT_EQ(with({{"SLURM_PROCID", "3"},
                  {"SLURM_NTASKS", "4"},
                  {"MASTER_ADDR", "n1"},
                  {"MASTER_PORT", "1"}}),
            "3/4 n1:1");
  EXPECT_EQ(with({{"SLURM_PROCID", "0"}, {"SLURM_NTASKS", "1"}}), "none");
  EXPECT_THAT(with({{"RANK", "1"}}), HasSubstr("[run] WORLD_SIZE is not set"));
  EXPECT_THAT(with({{"RANK", "2"}, {"WORLD_SIZE", "2"}}),
              HasSubstr("RANK is '2'; give an integer from 0 to 1"));
  EXPECT_THAT(with({{"RANK", "0"}, {"WORLD_SIZE", "2"}}), HasSubstr("MASTER_ADDR is not set"));
  EXPECT_THAT(
      with({{"RANK", "0"}, {"WORLD_SIZE", "2"}, {"MASTER_ADDR", "a"}, {"MASTER_PORT", "x"}}),
      HasSubstr("MASTER_PORT is 'x'"));
}

TEST(GlooTest, WhoDoesNotComeIsNamed) {
  RendezvousStore store(0);
  Rendezvous where = store.member(0, 3);
  where.patience = std::chrono::seconds(1);
  EXPECT_EQ(message_of([&] { join_group(where); }),
            "[run] rank 0 waited 1 s in vain for rank 1, 2 of 3 workers; start all of them");
}

TEST(LaunchTest, AKilledWorkerStopsTheOthersWithOneLine) {
  const auto start = Clock::now();
  const std::string text = message_of([] { run_processes(3, "killed"); });
  EXPECT_EQ(text, "[run] worker 1 was killed by signal 9 (Killed); the others were stopped");
  EXPECT_LT(since(start), 20);
}

TEST(LaunchTest, AKilledWorkerIsNoticedWhoeverHasItsPipes) {
  EXPECT_EQ(message_of([] { run_processes(3, "outlived"); }),
            "[run] worker 1 was killed by signal 9 (Killed); the others were stopped");
}

TEST(LaunchTest, TheFirstCauseIsReported) {
  EXPECT_EQ(message_of([] { run_processes(3, "mistaken"); }), "[test] rank 2 was given nonsense");
  EXPECT_EQ(message_of([] { run_processes(3, "stuck_exit"); }),
            "[run] worker 1 ended with code 7; the others were stopped");
}

TEST(LaunchTest, APortInUseIsSaidSo) {
  const int fd = socket(AF_INET6, SOCK_STREAM, 0);
  sockaddr_in6 address{};
  address.sin6_family = AF_INET6;
  socklen_t length = sizeof address;
  ASSERT_EQ(bind(fd, reinterpret_cast<sockaddr*>(&address), length), 0);
  ASSERT_EQ(listen(fd, 1), 0);
  ASSERT_EQ(getsockname(fd, reinterpret_cast<sockaddr*>(&address), &length), 0);
  const int port = ntohs(address.sin6_port);
  setenv("MASTER_PORT", std::to_string(port).c_str(), 1);
  EXPECT_EQ(message_of([] { run_processes(2, "collectives"); }),
            fmt::format("[run] MASTER_PORT {} is in use or may not be used; give a free one or "
                        "unset it",
                        port));
  setenv("MASTER_PORT", "http", 1);
  EXPECT_THAT(message_of([] { run_processes(2, "collectives"); }),
              HasSubstr("MASTER_PORT is 'http'"));
  unsetenv("MASTER_PORT");
  close(fd);
}

// ---- Training

TEST(TrainerTest, ProcessesEqualOneDevice) { EXPECT_NO_THROW(run_processes(3, "training")); }

TEST(TrainerTest, FiveProcessesTrainHapsModelsAsOneDevice) {
  EXPECT_NO_THROW(run_processes(5, "training_hap"));
}

// ---- Emulation

TEST(EmulateTest, PaddingGivesTheShare) { EXPECT_NO_THROW(run_processes(2, "padded")); }

TEST(EmulateTest, RepeatedWorkTakesItsLeastCpuTime) {
  const auto busy = [&](double seconds) {
    const double end = cpu_time() + seconds;
    while (cpu_time() < end) {
    }
  };
  struct Took {
    double all, own;  // with and without waits for a core that others had
  };
  const auto seconds_of = [&](const void* work) {
    Padding padding(0.5);
    const double waited_before = waited();
    const auto start = Clock::now();
    for (double seconds : {0.01, 0.02, 0.01, 0.02}) {
      busy(seconds);
      padding.after(true, work);
    }
    padding.before(false);
    const double wall = since(start);
    return Took{wall, wall - (waited() - waited_before)};
  };
  // Of its own, 60 ms of CPU time take 120 ms; repeated, 10 ms the first time and three times 20
  // ms.
  const int work = 0;
  double apart = 1, repeated = 1, repeated_own = 1;
  for (int i = 0; i < 5; ++i) {
    apart = std::min(apart, seconds_of(nullptr).all);
    const Took took = seconds_of(&work);
    repeated = std::min(repeated, took.all);
    repeated_own = std::min(repeated_own, took.own);
  }
  EXPECT_GT(apart, 0.115);
  EXPECT_GT(repeated, 0.065);
  EXPECT_LT(repeated_own, 0.09);
}

TEST(EmulateTest, PairsGetTheirPartOfEveryPort) {
  const Cluster cluster = load_cluster("local-mixed-4");
  const double slow = 400e6 / 8, fast = 4e9 / 8;
  EXPECT_DOUBLE_EQ(pair_bandwidth(cluster, 0, 1, Traffic::ring), fast);
  EXPECT_DOUBLE_EQ(pair_bandwidth(cluster, 1, 2, Traffic::ring), slow);
  EXPECT_DOUBLE_EQ(pair_bandwidth(cluster, 0, 1, Traffic::all_pairs), fast / 3);
  EXPECT_DOUBLE_EQ(pair_bandwidth(cluster, 0, 3, Traffic::all_pairs), slow / 4);
}

}  // namespace
}  // namespace motley
