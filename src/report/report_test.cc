#include "report/report.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <numeric>

#include "core/rng.h"
#include "planner/engines.h"
#include "planner/program_plan.h"
#include "report/html.h"
#include "report/timeline.h"
#include "report/words.h"
#include "sim/traffic.h"

namespace motley {
namespace {

using ::testing::HasSubstr;
using ::testing::Not;

// Two products and their gradients, for any number of samples.
std::string graph_text(int64_t n, const std::string& name) {
  return fmt::format(R"(model toy
%0 = motley::input("x") : f32[{0},64]
%1 = motley::parameter("{1}0.weight") : f32[64,64]
%2 = motley::parameter("{1}1.weight") : f32[64,64]
%3 = aten::mm(%0, %1) : f32[{0},64]
%4 = aten::mm(%3, %2) : f32[{0},64]
%5 = aten::sum(%4, none) : f32[]
%6 = aten::full([{0}, 64], 1.0, f32, none, none, none) : f32[{0},64] backward
%7 = aten::t(%3) : f32[64,{0}] backward
%8 = aten::mm(%7, %6) : f32[64,64] backward
%9 = aten::t(%2) : f32[64,64] backward
%10 = aten::mm(%6, %9) : f32[{0},64] backward
%11 = aten::t(%0) : f32[64,{0}] backward
%12 = aten::mm(%11, %10) : f32[64,64] backward
loss %5
gradient "{1}0.weight" %12
gradient "{1}1.weight" %8
)",
                     n, name);
}

const Link kLink{LinkKind::switched, 1e9, 1e-5};

std::vector<DeviceType> two_types(const std::string& name) {
  return {{name, 4e12, 4e12, 1.6e10, 1e11, 1e-6, 0}, {"small", 1e12, 1e12, 1.6e10, 1e11, 1e-6, 0}};
}

Plan spmd_plan(const Cluster& cluster, int64_t batch, const std::string& name = "block") {
  planner::ProgramRequest request;
  request.model = "toy";
  request.batch = batch;
  planner::ProgramResult result =
      planner::plan_program(parse_graph(graph_text(batch, name), "toy"), cluster, request);
  EXPECT_TRUE(result.feasible) << result.reason;
  return std::move(result.plan);
}

// Plans of all engines for one model.
std::vector<std::unique_ptr<Plan>> plans_of_all() {
  const Cluster cluster = flat_cluster(two_types("big"), {2, 2}, kLink);
  std::vector<std::unique_ptr<Plan>> plans;
  plans.push_back(std::make_unique<Plan>(spmd_plan(cluster, 16)));
  planner::PlanOptions request;
  request.model = "toy";
  request.batch = 16;
  const auto graph_of = [](int64_t n) { return parse_graph(graph_text(n, "block"), "toy"); };
  auto take = [&](planner::EngineResult found) {
    EXPECT_FALSE(found.candidates.empty()) << found.engine << ": " << found.reason;
    if (!found.candidates.empty()) plans.push_back(std::move(found.candidates[0].plan));
  };
  take(planner::plan_pipeline(request, cluster, graph_of));
  take(planner::plan_grid(request, cluster, graph_of, grid::parse_fixed("pp=2,dp=2,tp=1,mbs=2")));
  return plans;
}

// What is wrong with the tags of a page: not closed in order, or an attribute without quotes.
std::string misnested(const std::string& html) {
  std::vector<std::string> open;
  for (size_t at = html.find('<'); at != std::string::npos; at = html.find('<', at)) {
    if (html.compare(at, 2, "<!") == 0) {
      at = html.find('>', at);
      continue;
    }
    const bool closes = html[at + 1] == '/';
    size_t end = at + 1 + closes;
    while (std::isalnum(static_cast<unsigned char>(html[end]))) ++end;
    const std::string tag = html.substr(at + 1 + closes, end - at - 1 - closes);
    if (tag.empty()) return "a stray < at " + html.substr(at, 40);
    bool quoted = false;
    for (; html[end] != '>' || quoted; ++end) {
      if (end >= html.size() || html[end] == '<') return "a tag without end: " + tag;
      quoted ^= html[end] == '"';
    }
    at = end;
    if (closes) {
      if (open.empty() || open.back() != tag) return "</" + tag + "> closes something else";
      open.pop_back();
    } else if (tag != "meta") {
      open.push_back(tag);
      // Raw text up to the end tag.
      if (tag == "script" || tag == "style") at = html.find("</" + tag, at);
    }
  }
  return open.empty() ? "" : "not closed: " + open.back();
}

int count(const std::string& text, const std::string& what) {
  int n = 0;
  for (size_t at = text.find(what); at != std::string::npos; at = text.find(what, at + 1)) ++n;
  return n;
}

Json timeline_of(const std::string& html) {
  const std::string mark = "id=\"timeline-data\">";
  const size_t from = html.find(mark) + mark.size();
  return parse_json(html.substr(from, html.find("</script", from) - from), "timeline");
}

TEST(Report, PagesOfEveryEngineAreWholeAndWellFormed) {
  for (const auto& plan : plans_of_all()) {
    SCOPED_TRACE(plan->engine);
    plan->alternatives = {{"spmd", "a & b", false, true, 2e-3},
                          {"zero", "no room", true, false, 0}};
    ASSERT_THAT(check(*plan), ::testing::IsEmpty());
    const std::string html = to_html(*plan);
    EXPECT_EQ(misnested(html), "");
    const Plan read = parse_plan(to_json(*plan).dump(), "p.json");
    EXPECT_EQ(to_html(read), to_html(parse_plan(to_json(read).dump(), "p.json")));
    EXPECT_EQ(html, to_html(*plan));
    for (const char* outside : {"http:", "https:", " src=", " href=", "url(", "@import", "fetch("})
      EXPECT_THAT(html, Not(HasSubstr(outside)));
    EXPECT_THAT(html, HasSubstr("default-src 'none'"));
    const Simulation sim = simulate(*plan, Spans::all);
    for (const std::string& text :
         {plan->engine + " (this plan)", format_seconds(sim.step), std::string("ZeRO in one pass"),
          std::string("a &amp; b"), std::string("no room"), std::string("weight")})
      EXPECT_THAT(html, HasSubstr(text));
    EXPECT_EQ(html.find("<h2>Stages") != std::string::npos, plan->pipeline != nullptr);
    const Json timeline = timeline_of(html);
    Seconds end = 0;
    for (const Span& s : sim.spans) end = std::max(end, s.end);
    EXPECT_EQ(timeline["end"].get<double>(), end);
    EXPECT_FALSE(timeline["lanes"].empty());
  }
}

// Lanes of one device for all that do the same are those of every device by itself.
TEST(Report, LanesOfDevicesThatAreAlike) {
  for (const auto& plan : plans_of_all()) {
    SCOPED_TRACE(plan->engine);
    const auto of = [&](Spans spans) {
      return report::to_json(*plan, report::lanes_of(*plan, simulate(*plan, spans), 40000));
    };
    EXPECT_EQ(of(Spans::alike), of(Spans::all));
  }
}

// More spans than a page or a trace can hold are left out, all of them.
TEST(Report, TimelinesThatAreTooLongAreLeftOut) {
  Simulation sim;
  for (size_t i = 0; i <= kMostSpans; ++i)
    add_span({0, static_cast<double>(i), i + 0.5, "x", WalkKind::compute, {}}, &sim);
  EXPECT_TRUE(sim.too_long);
  EXPECT_TRUE(sim.spans.empty());
  EXPECT_THROW(to_trace(*plans_of_all()[0], sim), UserError);
}

TEST(Report, ReplicasThatAreAlikeAreOne) {
  planner::PlanOptions request;
  request.model = "toy";
  request.batch = 16;
  planner::EngineResult found = planner::plan_grid(
      request, flat_cluster({two_types("big")[0]}, {4}, kLink),
      [](int64_t n) { return parse_graph(graph_text(n, "block"), "toy"); },
      grid::parse_fixed("pp=2,dp=2,tp=1,mbs=2"));
  ASSERT_FALSE(found.candidates.empty()) << found.reason;
  Plan& plan = *found.candidates[0].plan;
  const auto stages = [&] {
    const std::string html = to_html(plan);
    const size_t from = html.find("<h2>Stages");
    return html.substr(from, html.find("<h2>Devices") - from);
  };
  EXPECT_EQ(count(stages(), "<tr"), 1 + 2);
  EXPECT_THAT(stages(), HasSubstr(" in the first)"));
  plan.pipeline->replicas[1].stages[0].warm_up += 1;
  EXPECT_EQ(count(stages(), "<tr"), 1 + 4);
  EXPECT_THAT(stages(), HasSubstr("as in replica 0"));
}

TEST(Report, NamesCannotBreakOut) {
  const std::string evil = "</script><img src=x onerror=alert(1)>\"'&<!--";
  Plan plan = spmd_plan(flat_cluster(two_types(evil), {1, 1}, kLink), 16, "</script><b>");
  plan.model = plan.cluster.name = evil;
  plan.alternatives = {{evil, evil, true, true, 1}};
  for (Group& g : plan.cluster.groups) g.name = evil;
  const std::string html = to_html(plan);
  EXPECT_EQ(misnested(html), "");
  EXPECT_EQ(count(html, "<script"), 2);
  EXPECT_EQ(count(html, "</script"), 2);
  for (const char* tag : {"<img", "<b>alert", "<!--"}) EXPECT_THAT(html, Not(HasSubstr(tag)));
  EXPECT_THAT(timeline_of(html)["lanes"][0]["label"].get<std::string>(), HasSubstr(evil));
  EXPECT_EQ(report::escape("a\x01<\n"), "a\xEF\xBF\xBD&lt;\n");
}

// Gradients of 2 x 64 x 64 floats around a ring of two: each sends half of them twice.
TEST(Report, LinksCarryWhatIsSent) {
  const Plan plan = spmd_plan(flat_cluster({two_types("big")[0]}, {2}, kLink), 1 << 16);
  const net::Topology topology(plan.cluster);
  Bytes sent = 0;
  for (const auto& c : report::communications(plan)) sent += c.bytes;
  const std::vector<Bytes> bytes = link_bytes(plan, topology);
  ASSERT_EQ(bytes.size(), 4u);  // up and down of two devices
  for (const Bytes b : bytes) EXPECT_NEAR(b, sent, 1e-6 * sent);
}

TEST(Report, ExplanationAndWhatIfsAreOfThePlanAndEscaped) {
  for (const auto& plan : plans_of_all()) {
    ReportParts parts;
    parts.explained.seconds = 1;
    const explain::Explanation explanation = explain::explain(plan.get(), parts.explained);
    advise::Question question;
    question.cluster = plan->cluster;
    advise::Advice advice;
    advice.now.found = true;
    advice.now.cost.step = 2;
    advice.now.name = "as it is";
    advice.edits = {{"add <b>2", true, "", {1, 0, 0}, {}, 4, ""},
                    {"drop", false, "n<o", {}, {}, 2, ""}};
    parts.explanation = &explanation;
    parts.question = &question;
    parts.advice = &advice;
    const std::string html = to_html(*plan, parts);
    EXPECT_EQ(misnested(html), "");
    for (const std::string& text :
         {report::escape(explanation.verdict[0]), std::string("add &lt;b&gt;2"),
          std::string("-50.0%"), std::string("n&lt;o"), std::string("What limits the step")})
      EXPECT_THAT(html, HasSubstr(text));
  }
}

TEST(Report, SaysWhatIsSentAndWhy) {
  const Plan plan = spmd_plan(flat_cluster({two_types("big")[0]}, {2}, kLink), 1 << 16);
  const auto list = report::communications(plan);
  ASSERT_FALSE(list.empty());
  Seconds comm = 0;
  for (const auto& c : list) comm += c.seconds;
  EXPECT_NEAR(comm, simulate(plan).devices[0].comm, 1e-12);
  EXPECT_EQ(list[0].what, "all_reduce of gradients");
  EXPECT_EQ(list[0].count, 2);
  EXPECT_EQ(list[0].bytes, 2 * 64 * 64 * 4);
  EXPECT_THAT(list[0].why, HasSubstr("the optimizer reads it whole"));
  const auto groups = report::parameter_groups(plan);
  ASSERT_EQ(groups.size(), 1u);
  EXPECT_EQ(groups[0].name, "block0–1.weight");
  EXPECT_EQ(groups[0].count, 2);
  EXPECT_EQ(groups[0].placement, "whole on every device");
  EXPECT_EQ(report::modules_of(*plan.graph), "block 0–1");
  EXPECT_EQ(report::ranges({0, 1, 2, 5, 7, 8}), "0–2, 5, 7–8");
}

// Spans on devices, some of which do the same.
Simulation random_spans(Rng& rng, int devices, int most) {
  Simulation sim;
  sim.devices.resize(devices);
  for (int d = 0; d < devices; ++d) {
    if (d > 0 && rng.below(3) == 0) {
      std::vector<Span> copy;
      const int other = static_cast<int>(rng.below(d));
      for (const Span& s : sim.spans)
        if (s.device == other) copy.push_back(s);
      for (Span& s : copy) {
        s.device = d;
        sim.spans.push_back(s);
      }
      continue;
    }
    Seconds now = 0;
    for (int i = static_cast<int>(rng.below(most)); i > 0; --i) {
      now += rng.below(2) * rng.uniform();
      const Seconds length = rng.uniform() * (rng.below(10) == 0 ? 10 : 0.1);
      sim.spans.push_back({d,
                           now,
                           now + length,
                           fmt::format("op{}", rng.below(5)),
                           static_cast<WalkKind>(rng.below(3)),
                           {}});
      now += length;
    }
  }
  return sim;
}

TEST(Report, TimelinesShrinkWithoutLosingTime) {
  Rng rng(3);
  for (int round = 0; round < 60; ++round) {
    const int devices = 1 + static_cast<int>(rng.below(12));
    Plan plan;
    plan.cluster = flat_cluster({two_types("big")[0]}, {devices}, kLink);
    plan.set_graph(Graph());
    const Simulation sim = random_spans(rng, devices, round % 2 ? 30 : 400);
    const size_t budget = round % 3 ? 64 : 1000000;
    const auto lanes = report::lanes_of(plan, sim, budget);
    const size_t most = std::max<size_t>(16, budget / lanes.size());
    std::vector<int> seen;
    for (const report::Lane& lane : lanes) {
      seen.insert(seen.end(), lane.devices.begin(), lane.devices.end());
      EXPECT_LE(lane.bars.size(), most);
      for (size_t i = 1; i < lane.bars.size(); ++i)
        EXPECT_GE(lane.bars[i].begin, lane.bars[i - 1].end - 1e-9);
      for (int d : lane.devices) {
        int spans = 0, merged = 0;
        for (const Span& s : sim.spans) {
          if (s.device != d) continue;
          ++spans;
          EXPECT_EQ(std::count_if(
                        lane.bars.begin(), lane.bars.end(),
                        [&](const report::Bar& b) { return b.begin <= s.begin && s.end <= b.end; }),
                    1);
        }
        for (const report::Bar& b : lane.bars) merged += b.merged;
        EXPECT_EQ(merged, spans);
        if (static_cast<size_t>(spans) <= most) {
          EXPECT_EQ(lane.bars.size(), static_cast<size_t>(spans));
        }
      }
    }
    std::sort(seen.begin(), seen.end());
    std::vector<int> all(devices);
    std::iota(all.begin(), all.end(), 0);
    EXPECT_EQ(seen, all);
  }
}

// A thousand devices that all do something else, and long timelines, still make a page that opens.
TEST(Report, SizeIsBounded) {
  Plan plan = spmd_plan(flat_cluster(two_types("big"), {512, 512}, kLink), 1 << 15);
  double sum = 0;
  std::vector<double>& ratios = plan.ratios[0];
  for (size_t d = 0; d < ratios.size(); ++d) sum += ratios[d] = 1 + static_cast<double>(d) / 512;
  for (double& r : ratios) r /= sum;
  EXPECT_LT(to_html(plan).size(), size_t{4} << 20);
  Rng rng(5);
  Simulation sim;
  for (int d = 0; d < 1024; ++d)
    for (int i = 0; i < 400; ++i)
      sim.spans.push_back({d,
                           i + rng.uniform() / 3,
                           i + 0.5 + rng.uniform() / 3,
                           fmt::format("op{}", i),
                           WalkKind::compute,
                           {}});
  const auto lanes = report::lanes_of(plan, sim, 40000);
  EXPECT_EQ(lanes.size(), 1024u);
  EXPECT_LT(report::to_json(plan, lanes).dump().size(), size_t{2} << 20);
}

}  // namespace
}  // namespace motley
