// The runtime as a whole: groups of real processes, training by plans, emulation, failures.
//
// A test that needs processes starts this program again, several times, with the name of a body in
// a variable; Worker.DISABLED_Body runs it.
#include <ATen/ATen.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <netinet/in.h>
#include <sys/socket.h>
#include <unistd.h>

#include <chrono>
#include <csignal>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <numeric>
#include <optional>
#include <thread>

#include "capture/capture.h"
#include "comm/gloo.h"
#include "comm/launch.h"
#include "comm/meeting.h"
#include "comm/process_group.h"
#include "comm/staged.h"
#include "core/error.h"
#include "core/file.h"
#include "cost/overlap.h"
#include "graph/canonical.h"
#include "graph/precision.h"
#include "interpret/dispatch.h"
#include "planner/program_plan.h"
#include "runtime/data.h"
#include "runtime/eager.h"
#include "runtime/trainer.h"
#include "runtime/verify.h"

namespace motley {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::Not;
using Clock = std::chrono::steady_clock;

double since(Clock::time_point start) {
  return std::chrono::duration<double>(Clock::now() - start).count();
}

// `count` devices; the first is as fast as three of the last.
Cluster uneven_cluster(int count) {
  std::vector<DeviceType> types;
  for (int i = 0; i < count; ++i) {
    DeviceType type;
    type.name = fmt::format("type{}", i);
    type.flops = type.half_flops = 1e9 * (3 - 2. * i / std::max(count - 1, 1));
    type.memory = 1e10;
    type.memory_bandwidth = 1e10;
    type.overhead = 1e-6;
    type.speed = 0.2;
    types.push_back(type);
  }
  return flat_cluster(types, std::vector<int>(count, 1), {LinkKind::switched, 1e8, 1e-6});
}

Plan make(const std::string& model, int64_t batch, const Cluster& cluster,
          spmd::Restriction restriction = spmd::Restriction::none,
          Optimizer optimizer = Optimizer::adamw) {
  planner::ProgramRequest request;
  request.model = model;
  request.batch = batch;
  request.baselines = request.alternation.certify = false;
  request.alternation.optimizer = optimizer;
  request.alternation.restriction = restriction;
  request.alternation.ratios = planner::proportional_ratios(cluster);
  planner::ProgramResult result =
      planner::plan_program(canonicalize(capture(model, batch).graph), cluster, request);
  MOTLEY_CHECK(result.feasible, "{}", result.reason);
  return std::move(result.plan);
}

std::vector<StepReport> train_on_threads(const Plan& plan, const TrainOptions& options,
                                         int64_t steps) {
  std::vector<StepReport> reports;
  run_thread_group(plan.cluster.size(), [&](Communicator& group) {
    RunReport report = train(plan, group, options, steps);
    if (group.rank() == 0) reports = report.steps;
  });
  return reports;
}

std::string message_of(const std::function<void()>& body) {
  try {
    body();
  } catch (const std::exception& e) {
    return e.what();
  }
  return "nothing was thrown";
}

// ---- What workers do. A body throws if something is wrong.

const char* kModels[] = {"mlp:layers=3,hidden=16,in=12,classes=5",
                         "gpt:layers=1,hidden=16,heads=4,seq=8,vocab=256",
                         "convnet:width=4,image=8,classes=5"};

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
    const Plan plan = make(kModels[0], 12, uneven_cluster(group.size()));
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
    const Plan plan = make(model, 12, uneven_cluster(group.size()));
    const RunReport report = train(plan, group, {}, 3);
    if (group.rank() != 0) continue;
    const Plan alone = make(model, 12, uneven_cluster(1));
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
  const Plan plan = make(kModels[0], 12, uneven_cluster(group.size()));
  train(plan, group, {}, 1 << 20, [&](const StepReport& step) {
    if (group.rank() == 1 && step.step == 3) std::raise(SIGKILL);
  });
}

void mistaken(ProcessCommunicator& group) {
  if (group.rank() == 2) throw user_error("test", "rank 2 was given nonsense");
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

TEST(TrainerTest, ClippingIsOfTheWholeGradient) {
  const std::string model = "mlp:layers=3,hidden=16,in=12,classes=5";
  TrainOptions options;
  options.clip = 0.05;
  for (Optimizer optimizer : {Optimizer::adamw, Optimizer::sgd}) {
    const Plan alone = make(model, 12, uneven_cluster(1), spmd::Restriction::none, optimizer);
    const std::vector<StepReport> expected = train_on_threads(alone, options, 4);
    for (spmd::Restriction restriction :
         {spmd::Restriction::zero, spmd::Restriction::tensor_parallel,
          spmd::Restriction::data_parallel}) {
      const Plan plan = make(model, 12, uneven_cluster(3), restriction, optimizer);
      bool cut = false;
      for (const Parameter& p : plan.graph->parameters)
        cut = cut || stored_placements(*plan.theory, plan.program)[p.value.index].is_shard();
      EXPECT_EQ(cut, restriction != spmd::Restriction::data_parallel);
      const std::vector<StepReport> steps = train_on_threads(plan, options, 4);
      for (int i = 0; i < 4; ++i) {
        EXPECT_GT(steps[i].gradient_norm, options.clip);
        EXPECT_NEAR(steps[i].gradient_norm, expected[i].gradient_norm,
                    2e-5 * expected[i].gradient_norm);
        EXPECT_NEAR(steps[i].loss, expected[i].loss, 2e-5 * expected[i].loss);
      }
    }
  }
}

TEST(TrainerTest, ACheckpointGoesOnUnderAnotherPlan) {
  const std::string folder = testing::TempDir() + "/motley_checkpoint";
  for (const char* model : {kModels[1], kModels[2]})
    for (Optimizer optimizer : {Optimizer::adamw, Optimizer::sgd}) {
      std::filesystem::remove_all(folder);
      const Plan wide = make(model, 8, uneven_cluster(3), spmd::Restriction::zero, optimizer);
      const Plan other = make(model, 8, uneven_cluster(2), spmd::Restriction::none, optimizer);
      const std::vector<StepReport> expected = train_on_threads(wide, {}, 4);
      TrainOptions options;
      options.checkpoint = folder;
      train_on_threads(wide, options, 2);
      const std::vector<StepReport> steps = train_on_threads(other, options, 2);
      for (int i = 0; i < 2; ++i) {
        EXPECT_EQ(steps[i].step, 2 + i);
        EXPECT_NEAR(steps[i].loss, expected[2 + i].loss, 5e-5 * expected[2 + i].loss) << model;
      }
      const Plan stranger = make(kModels[0], 8, uneven_cluster(1));
      EXPECT_THAT(message_of([&] { train_on_threads(stranger, options, 1); }),
                  AllOf(HasSubstr("is of model"), HasSubstr(kModels[0])));
    }
  std::filesystem::remove_all(folder);
}

TEST(TrainerTest, APlanForAnotherModelIsRefused) {
  Plan plan = make("mlp:layers=2,hidden=8,in=6,classes=5", 4, uneven_cluster(1));
  EXPECT_NO_THROW(graph_of_model(plan));
  plan.model = "mlp:layers=3,hidden=8,in=6,classes=5";
  EXPECT_THAT(message_of([&] { graph_of_model(plan); }),
              AllOf(HasSubstr("a plan for another model"),
                    HasSubstr("mlp:layers=2,hidden=8,in=6,classes=5"),
                    HasSubstr("mlp:layers=3,hidden=8,in=6,classes=5")));
}

// One device computes in the same types, but sums in another order: a product of bf16 is rounded to
// 8 bits, so losses agree to a few thousandths. AdamW, whose first steps are of the size of the
// learning rate whatever the gradient, turns signs of tiny gradients into differences of weights.
TEST(TrainerTest, MixedPrecisionEqualsOneDevice) {
  auto mixed = [](const std::string& model, const Cluster& cluster, spmd::Restriction restriction) {
    planner::ProgramRequest request;
    request.model = model;
    request.batch = 12;
    request.baselines = request.alternation.certify = false;
    request.alternation.restriction = restriction;
    request.alternation.ratios = planner::proportional_ratios(cluster);
    planner::ProgramResult result = planner::plan_program(
        with_precision(canonicalize(capture(model, 12).graph), DType::bf16), cluster, request);
    MOTLEY_CHECK(result.feasible, "{}", result.reason);
    result.plan.precision = DType::bf16;
    return std::move(result.plan);
  };
  for (const char* model : kModels) {
    SCOPED_TRACE(model);
    const Plan alone = mixed(model, uneven_cluster(1), spmd::Restriction::none);
    EXPECT_TRUE(check(alone).empty());
    const std::vector<StepReport> expected = train_on_threads(alone, {}, 4);
    const std::vector<StepReport> full =
        train_on_threads(make(model, 12, uneven_cluster(1)), {}, 4);
    EXPECT_NE(expected[0].loss, full[0].loss);
    for (spmd::Restriction restriction :
         {spmd::Restriction::none, spmd::Restriction::zero, spmd::Restriction::data_parallel}) {
      const Plan plan = mixed(model, uneven_cluster(3), restriction);
      const Plan read = parse_plan(to_json(plan).dump(), "plan");
      EXPECT_EQ(read.precision, DType::bf16);
      EXPECT_TRUE(check(read).empty());
      EXPECT_NO_THROW(graph_of_model(read));
      // Without rounding it is the program of one device to the last digits.
      const Verification exact = verify_plan(read);
      EXPECT_TRUE(exact.equivalent) << exact.loss_error << " " << exact.gradient_error;
      const Verification rounded = verify_plan(read, DType::bf16);
      EXPECT_TRUE(rounded.equivalent)
          << rounded.loss_error << " " << rounded.gradient_error << " " << rounded.worst_parameter;
      const std::vector<StepReport> steps = train_on_threads(read, {}, 4);
      for (int i = 0; i < 4; ++i) {
        EXPECT_NEAR(steps[i].loss, expected[i].loss, 1e-2 * expected[i].loss) << i;
        EXPECT_NEAR(steps[i].loss, full[i].loss, 2e-2 * full[i].loss) << i;
      }
    }
  }
}

// A plan that fits only with blocks computed again runs, file and all, to what one device gets; the
// dropout masks of the second time are those of the first.
TEST(TrainerTest, RecomputedBlocksEqualOneDevice) {
  const std::string model = "gpt:layers=3,hidden=32,heads=4,seq=32,vocab=64,dropout=0.1";
  auto plan_with = [&](Bytes available, bool recompute) {
    Cluster cluster = uneven_cluster(3);
    for (DeviceType& type : cluster.types) type.memory = available;
    planner::ProgramRequest request;
    request.model = model;
    request.batch = 12;
    request.baselines = request.alternation.certify = false;
    request.alternation.recompute = recompute;
    return planner::plan_program(canonicalize(capture(model, 12).graph), cluster, request);
  };
  const planner::ProgramResult free = plan_with(1e10, true);
  ASSERT_TRUE(free.feasible);
  // Too little without computing anything again.
  Bytes memory =
      *std::max_element(free.plan.peak_memory_bytes.begin(), free.plan.peak_memory_bytes.end());
  while (plan_with(memory, false).feasible) memory *= 0.8;
  const planner::ProgramResult lean = plan_with(memory, true);
  ASSERT_TRUE(lean.feasible) << lean.reason;
  const Plan read = parse_plan(to_json(lean.plan).dump(), "plan");
  EXPECT_TRUE(check(read).empty());
  EXPECT_THAT(describe(read), HasSubstr("recomputes"));
  EXPECT_GT(read.predicted_step_s, free.plan.predicted_step_s);
  for (Bytes peak : read.peak_memory_bytes) EXPECT_LE(peak, memory);
  const Verification v = verify_plan(read);
  EXPECT_TRUE(v.equivalent) << v.loss_error << " " << v.gradient_error << " " << v.worst_parameter;
  const std::vector<StepReport> steps = train_on_threads(read, {}, 3),
                                expected = train_on_threads(free.plan, {}, 3);
  for (int i = 0; i < 3; ++i) EXPECT_NEAR(steps[i].loss, expected[i].loss, 1e-5 * expected[i].loss);
}

// Every tensor has the type that the graph says, which memory and messages are counted by.
TEST(TrainerTest, MixedPrecisionHasTheTypesOfItsGraph) {
  for (const char* model : {kModels[1], kModels[2]}) {
    const Graph graph = with_precision(canonicalize(capture(model, 4).graph), DType::bf16);
    const std::shared_ptr<TrainModule> module = materialize(parse_model(model), 0, DType::f32);
    Feeds feeds{{}, {}, random_inputs(*module, 4, 1, DType::f32)};
    for (const auto& [name, tensor] : parameters_of(*module))
      feeds.parameters[name] = tensor.detach();
    for (const auto& [name, tensor] : buffers_of(*module)) feeds.buffers[name] = tensor;
    InterpretOptions options;
    options.observe = [&](ValueId v, const at::Tensor& tensor) {
      const Node& node = graph.node(graph.value(v).producer);
      EXPECT_EQ(tensor.scalar_type(), to_torch(graph.spec(v).dtype)) << node.op;
    };
    interpret(graph, feeds, options);
  }
}

TEST(TrainerTest, VerifyFindsPlansEquivalent) {
  for (const char* model : {kModels[0], kModels[1], kModels[2],
                            "gpt:layers=1,hidden=16,heads=2,seq=8,vocab=20,dropout=0.1"}) {
    const Plan plan = make(model, 8, uneven_cluster(3));
    const Verification exact = verify_plan(plan);
    EXPECT_TRUE(exact.equivalent) << model << " " << exact.loss_error << " " << exact.gradient_error
                                  << " " << exact.worst_parameter;
    EXPECT_TRUE(verify_plan(plan, DType::f32).equivalent) << model;
  }
}

// ---- Emulation and data

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

TEST(DataTest, BatchesAreAFunctionOfSeedAndStep) {
  const TensorSpec ids{DType::i64, {4, 6}};
  const std::vector<InputSpec> text = {{"tokens", ids, 256}, {"targets", ids, 256}};
  const std::string file = testing::TempDir() + "/motley_text";
  std::string all;
  for (int i = 0; i < 1000; ++i) all += static_cast<char>('a' + i % 26);
  write_file(file, all);
  Dataset one(text, file, 1), same(text, file, 1), other(text, file, 2);
  EXPECT_TRUE(one.batch(5)["tokens"].equal(same.batch(5)["tokens"]));
  EXPECT_FALSE(one.batch(5)["tokens"].equal(one.batch(6)["tokens"]));
  EXPECT_FALSE(one.batch(5)["tokens"].equal(other.batch(5)["tokens"]));
  TensorMap batch = one.batch(0);
  EXPECT_TRUE(batch["targets"].slice(1, 0, 5).equal(batch["tokens"].slice(1, 1, 6)));
  EXPECT_EQ(Dataset(text, "", 1).description().find("random"), std::string::npos);

  const std::vector<InputSpec> image = {{"x", {DType::f32, {2, 3}}, 0},
                                        {"labels", {DType::i64, {2}}, 5}};
  EXPECT_TRUE(Dataset(image, "", 3).batch(0)["x"].equal(Dataset(image, "", 3).batch(0)["x"]));
  EXPECT_LT(Dataset(image, "", 3).batch(0)["labels"].max().item<int64_t>(), 5);

  write_file(file, "short");
  EXPECT_THAT(message_of([&] { Dataset(text, file, 1); }),
              HasSubstr("holds 5 bytes; a sample of this model needs 7"));
  EXPECT_THAT(message_of([&] { Dataset(text, "/no/such", 1); }),
              HasSubstr("[run] --data /no/such does not exist"));
  EXPECT_THAT(message_of([&] { Dataset(image, file, 1); }),
              HasSubstr("this model does not read text"));
  EXPECT_THAT(message_of([&] {
                Dataset({{"tokens", ids, 20}, {"targets", ids, 20}}, file, 1);
              }),
              HasSubstr("vocab is 20; bytes need at least 256"));
  std::filesystem::remove(file);
}

// ---- Gradients beside the backward pass.

TEST(Overlap, MessagesAreReadyBeforeTheyAreNeededAndHideNoMoreThanThereIs) {
  for (const char* model : {"mlp:layers=6,hidden=512,in=64,classes=5",
                            "gpt:layers=2,hidden=256,heads=4,seq=8,vocab=256"})
    for (BytesPerSecond bandwidth : {1e7, 1e9, 1e12})
      for (spmd::Restriction restriction :
           {spmd::Restriction::data_parallel, spmd::Restriction::tensor_parallel}) {
        Cluster cluster = uneven_cluster(3);
        cluster.groups[0].link.bandwidth = bandwidth;
        const Plan plan = make(model, 12, cluster, restriction);
        const Theory& theory = *plan.theory;
        const std::vector<Step>& steps = plan.program.steps;
        const std::vector<bool> pure = pure_gradients(*plan.graph);
        std::vector<int> times_sent(steps.size());
        int last_ready = -1;
        for (const GradientMessage& m :
             gradient_messages(theory, plan.program, Shares(plan.ratios))) {
          EXPECT_GE(m.ready, last_ready);
          last_ready = m.ready;
          for (int s : m.steps) {
            ++times_sent[s];
            // Its operand is made, and no other collective stands between.
            bool made = false;
            for (int i = 0; i <= m.ready; ++i)
              if (steps[i].is_compute()) {
                const Node& node = plan.graph->node(steps[i].node);
                for (size_t o = 0; o < node.outputs.size(); ++o)
                  made = made ||
                         (node.outputs[o] == steps[s].value &&
                          theory.triples(steps[i].node)[steps[i].triple].out[o] == steps[s].from);
              } else {
                made = made || (steps[i].value == steps[s].value && steps[i].to == steps[s].from);
              }
            EXPECT_TRUE(made) << model << " step " << s;
            for (int i = m.ready + 1; i < s; ++i)
              EXPECT_TRUE(steps[i].is_compute() || moves_nothing(steps[i].kind) ||
                          pure[steps[i].value.index]);
          }
        }
        for (size_t s = 0; s < steps.size(); ++s)
          EXPECT_EQ(times_sent[s], !steps[s].is_compute() &&
                                       steps[s].kind == Collective::all_reduce &&
                                       pure[steps[s].value.index]);
        const CostModel model_of_cost(cluster);
        const Shares shares(plan.ratios);
        const Fractions fractions(cluster, shares);
        const ProgramCost cost =
            cost_of(theory, plan.program, model_of_cost, fractions, plan.optimizer);
        const Seconds hidden = hidden_seconds(theory, plan.program, model_of_cost, fractions);
        EXPECT_LE(hidden, cost.comm * (1 + 1e-9));
        EXPECT_LE(hidden, cost.step - cost.comm);
        // Gradients that take longer than the whole computation hide part of it; fast ones nearly
        // vanish.
        if (restriction == spmd::Restriction::data_parallel) {
          EXPECT_GT(hidden, 0) << model << " at " << bandwidth;
          if (bandwidth == 1e9) {
            EXPECT_GT(hidden, 0.3 * cost.comm) << model;
          }
        }
      }
}

// Gradients that are summed and gathered one by one are waited for all along the backward pass.
TEST(Overlap, EveryWaitEndsWhatIsHidden) {
  for (const char* model : {"gpt:layers=6,hidden=32,heads=4,vocab=64,seq=64",
                            "mlp:layers=6,hidden=64,in=64,classes=5"}) {
    const Cluster cluster = load_cluster("local-mixed-4");
    const Plan plan = make(model, 16, cluster, spmd::Restriction::zero);
    const CostModel model_of_cost(cluster);
    const Shares shares(plan.ratios);
    const Fractions fractions(cluster, shares);
    const ProgramCost cost =
        cost_of(*plan.theory, plan.program, model_of_cost, fractions, plan.optimizer);
    const Seconds hidden = hidden_seconds(*plan.theory, plan.program, model_of_cost, fractions);
    EXPECT_LE(hidden, cost.comm * (1 + 1e-9)) << model;
    EXPECT_LE(hidden, (cost.step - cost.comm) * (1 + 1e-9)) << model;
  }
}

}  // namespace
}  // namespace motley
