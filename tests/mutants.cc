#include "mutants.h"

#include <ATen/ops/allclose.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cctype>
#include <csignal>
#include <cstdlib>
#include <map>
#include <regex>
#include <set>

#include "comm/launch.h"
#include "core/error.h"
#include "plan/plan.h"
#include "runtime/consistency.h"
#include "runtime/derivative.h"
#include "runtime/trainer.h"
#include "runtime/verify.h"

namespace motley {

namespace {

constexpr int kSeconds = 60;      // until a mutant that runs has hung
const std::string kOwn = "own ";  // a captured graph whose model has another name than the zoo's

size_t any(size_t count, Rng* rng) {
  return static_cast<size_t>(rng->below(static_cast<int64_t>(count)));
}
template <typename T>
T one_of(std::initializer_list<T> list, Rng* rng) {
  return *(list.begin() + static_cast<std::ptrdiff_t>(any(list.size(), rng)));
}

std::vector<std::string> words_of(const std::string& line) {
  std::vector<std::string> words(1);
  for (char c : line) {
    if (c == ' ')
      words.emplace_back();
    else
      words.back() += c;
  }
  return words;
}

std::string joined(const std::vector<std::string>& words) {
  return fmt::format("{}", fmt::join(words, " "));
}

// All program lists of a plan.
std::vector<Json*> programs_of(Json* plan) {
  std::vector<Json*> list;
  if (plan->contains("program")) list.push_back(&(*plan)["program"]);
  if (plan->contains("pipeline"))
    for (Json& replica : (*plan)["pipeline"]["replicas"])
      for (Json& stage : replica["stages"])
        if (stage.contains("program")) list.push_back(&stage["program"]);
  return list;
}

std::string random_placement(Rng* rng) {
  return one_of<std::string>({"R", "P", "S(0)", "S(1)", "S(2)", "S(0.1)", "S(1.1)"}, rng);
}

// One word of a step: a placement, a collective, a value, a prefix.
std::string reworded(const std::string& line, Rng* rng) {
  std::vector<std::string> words = words_of(line);
  const size_t w = any(words.size(), rng);
  std::string& word = words[w];
  const bool comma = !word.empty() && word.back() == ',';
  if (word == "again" || word == "each") {
    words.erase(words.begin() + static_cast<std::ptrdiff_t>(w));
  } else if (word[0] == '%') {
    word = fmt::format("%{}",
                       std::max(0, std::atoi(word.c_str() + 1) + one_of({-2, -1, 1, 2, 7}, rng)));
  } else if (word[0] == 'R' || word[0] == 'P' || word[0] == 'S') {
    word = random_placement(rng) + (comma ? "," : "");
  } else if (word == "grouped") {
    words.pop_back();
  } else if (words[0] != "node" && rng->chance(0.5)) {
    word = one_of<std::string>(
        {"all_reduce", "reduce_scatter", "all_gather", "all_to_all", "slice", "mask"}, rng);
  } else {
    words.insert(words.begin(), one_of<std::string>({"again", "each"}, rng));
  }
  return joined(words);
}

std::string mutate_program(Json* plan, Rng* rng) {
  const std::vector<Json*> programs = programs_of(plan);
  Json& program = *programs[any(programs.size(), rng)];
  if (program.empty()) return "";
  const size_t at = any(program.size(), rng), other = any(program.size(), rng);
  const std::string line = program[at], there = program[other];
  const auto position = [&](size_t i) { return program.begin() + static_cast<std::ptrdiff_t>(i); };
  switch (rng->below(8)) {
    case 0:
      program.erase(at);
      return "drops step " + line;
    case 1:
      program.insert(position(other), line);
      return fmt::format("puts step {} also in front of step {}", line, other);
    case 2:
      std::swap(program[at], program[other]);
      return fmt::format("swaps {} and {}", line, there);
    case 3: {
      const size_t next = std::min(at + 1 + any(3, rng), program.size() - 1);
      std::swap(program[at], program[next]);
      return fmt::format("swaps neighbours {} and {}", at, next);
    }
    case 4:
      program.erase(at);
      program.insert(position(std::min(other, program.size())), line);
      return fmt::format("moves {} to {}", line, other);
    case 5:
    case 6: {
      // Most steps compute; collectives are what goes wrong.
      size_t chosen = at;
      for (int i = 0; i < 6 && program[chosen].get<std::string>().find("node") != std::string::npos;
           ++i)
        chosen = any(program.size(), rng);
      const std::string old = program[chosen], changed = reworded(old, rng);
      program[chosen] = changed;
      return fmt::format("makes {} of {}", changed, old);
    }
    default: {
      // A step that runs again, somewhere behind.
      const size_t to = at + any(program.size() - at, rng) + 1;
      std::string again = line;
      for (const char* prefix : {"again ", "each "})
        if (again.starts_with(prefix)) again = again.substr(std::string(prefix).size());
      again = one_of<std::string>({"again ", "again ", "each ", ""}, rng) + again;
      program.insert(position(to), again);
      return fmt::format("adds {} as step {}", again, to);
    }
  }
}

std::string mutate_number(Json* value, Rng* rng) {
  const Json old = *value;
  if (value->is_number_integer())
    *value = value->get<int64_t>() + one_of<int64_t>({-2, -1, 1, 2, 5}, rng);
  else if (value->is_number())
    *value = one_of({0.0, -1.0, 0.1, 0.5, 3.0}, rng) * value->get<double>();
  return fmt::format("{} becomes {}", old.dump(), value->dump());
}

std::string mutate_list(Json* list, Rng* rng) {
  if (list->empty()) return "";
  const size_t at = any(list->size(), rng);
  Json& item = (*list)[at];
  if (item.is_array()) return mutate_list(&item, rng);
  switch (rng->below(4)) {
    case 0:
      list->erase(at);
      return "drops a number";
    case 1:
      list->push_back(item);
      return "repeats a number";
    case 2:
      std::swap(item, (*list)[any(list->size(), rng)]);
      return "swaps numbers";
    default:
      return mutate_number(&item, rng);
  }
}

std::string mutate_stage(Json* pipeline, Rng* rng) {
  Json& replica = (*pipeline)["replicas"][any((*pipeline)["replicas"].size(), rng)];
  Json& stage = replica["stages"][any(replica["stages"].size(), rng)];
  switch (rng->below(5)) {
    case 0:
      return "devices: " + mutate_list(&stage["devices"], rng);
    case 1:
      return "ratios: " + mutate_list(&stage["ratios"], rng);
    case 2:
      return "warm_up: " + mutate_number(&stage["warm_up"], rng);
    case 3:
      stage["recompute"] = !stage.value("recompute", false);
      return "recompute toggled";
    default:
      return "micro_batches: " + mutate_number(&replica["micro_batches"], rng);
  }
}

std::string mutate_pipeline(Json* plan, Rng* rng) {
  Json& pipeline = (*plan)["pipeline"];
  switch (rng->below(7)) {
    case 0:
      return "micro_batch: " + mutate_number(&pipeline["micro_batch"], rng);
    case 1:
      return "nodes: " + mutate_list(&pipeline["nodes"], rng);
    case 2: {
      Json& replicas = pipeline["replicas"];
      std::swap(replicas[0], replicas[any(replicas.size(), rng)]);
      return "swaps replicas";
    }
    case 3: {
      Json& zero = pipeline["zero"];
      zero = Json::array();
      for (int64_t s = 0; s < pipeline["stages"].get<int64_t>(); ++s)
        zero.push_back({{"level", rng->below(3)}});
      if (rng->chance(0.3)) zero[0]["shares"] = {1, 2};
      return "divides state: " + zero.dump();
    }
    default:
      return mutate_stage(&pipeline, rng);
  }
}

// One word of a line of the graph.
std::string regraphed(const std::string& line, Rng* rng) {
  static const std::map<std::string, std::vector<std::string>> alike = {
      {"aten::add.Tensor", {"aten::mul.Tensor", "aten::sub.Tensor"}},
      {"aten::mul.Tensor", {"aten::add.Tensor", "aten::div.Tensor"}},
      {"aten::relu", {"aten::tanh", "aten::gelu"}},
      {"aten::gelu", {"aten::relu", "aten::silu"}},
      {"aten::sum.dim_IntList", {"aten::mean.dim", "aten::amax"}},
      {"aten::mm", {"aten::matmul"}}};
  const int kind = static_cast<int>(rng->below(6));
  if (kind == 0)
    for (const auto& [op, others] : alike)
      if (const size_t at = line.find(op + "("); at != std::string::npos)
        return line.substr(0, at) + others[any(others.size(), rng)] + line.substr(at + op.size());
  if (kind == 1) {
    if (line.ends_with(" backward")) return line.substr(0, line.size() - 9);
    return line + " backward";
  }
  static const std::regex number("[%.\\w]*\\d[.\\w]*"), type("(f32|i64|b8|f64|bf16)\\[");
  const std::regex& what = kind == 2 ? type : number;
  std::vector<std::smatch> found;
  const size_t begin = std::min(line.find('='), line.size());  // results keep their numbers
  for (auto it = std::sregex_iterator(line.begin() + static_cast<std::ptrdiff_t>(begin), line.end(),
                                      what);
       it != std::sregex_iterator(); ++it)
    found.push_back(*it);
  if (found.empty()) return line;
  const std::smatch& match = found[any(found.size(), rng)];
  const std::string old = match.str();
  std::string fresh;
  if (kind == 2)
    fresh = one_of<std::string>({"f32[", "i64[", "b8[", "f64[", "bf16["}, rng);
  else if (old[0] == '%')
    fresh = fmt::format(
        "%{}", std::max(0, std::atoi(old.c_str() + 1) - 1 - static_cast<int>(rng->below(6))));
  else if (old.find('.') != std::string::npos || old.find('e') != std::string::npos)
    fresh = one_of<std::string>({"0.5", "2.0", "0.0", "-1.0"}, rng);
  else
    fresh = fmt::format("{}", std::max(0, std::atoi(old.c_str()) + one_of({-1, 1, 2}, rng)));
  const size_t at = begin + static_cast<size_t>(match.position());
  return line.substr(0, at) + fresh + line.substr(at + old.size());
}

// Lets a loss, gradient or update be another value of the same type and shape.
std::string redirect(Json* graph, size_t at, Rng* rng) {
  std::map<std::string, std::string> spec_of;  // of nodes with one result
  for (const Json& item : *graph) {
    const std::string line = item;
    const size_t equals = line.find(" = "), colon = line.rfind(" : ");
    if (line.starts_with("%") && equals != std::string::npos && colon != std::string::npos)
      spec_of[line.substr(0, equals)] = line.substr(colon + 3, line.find(']', colon) - colon - 2);
  }
  const std::string old = (*graph)[at];
  const size_t percent = old.rfind('%');
  const std::string now = old.substr(percent);
  std::vector<std::string> alike;
  for (const auto& [value, spec] : spec_of)
    if (value != now && spec_of.count(now) > 0 && spec == spec_of.at(now)) alike.push_back(value);
  if (alike.empty()) return "";
  (*graph)[at] = old.substr(0, percent) + alike[any(alike.size(), rng)];
  return fmt::format("makes {} of {}", (*graph)[at].get<std::string>(), old);
}

std::string mutate_graph(Json* plan, Rng* rng) {
  Json& graph = (*plan)["graph"];
  std::vector<size_t> nodes, gradients, loss;
  for (size_t i = 0; i < graph.size(); ++i) {
    const std::string line = graph[i];
    if (line.starts_with("%")) nodes.push_back(i);
    if (line.starts_with("gradient") || line.starts_with("update")) gradients.push_back(i);
    if (line.starts_with("loss")) loss.push_back(i);
  }
  const int kind = static_cast<int>(rng->below(10));
  if (kind == 0 && !gradients.empty()) {
    const size_t at = gradients[any(gradients.size(), rng)];
    const std::string old = graph[at];
    graph.erase(at);
    return "drops " + old;
  }
  if ((kind == 1 || kind == 2) && gradients.size() > 1 && rng->chance(0.7))
    return redirect(&graph, kind == 1 ? gradients[any(gradients.size(), rng)] : loss[0], rng);
  if ((kind == 1 && gradients.size() > 1) || kind == 2) {
    const size_t at = kind == 1 ? gradients[any(gradients.size(), rng)] : loss[0];
    const std::string old = graph[at];
    const size_t percent = old.rfind('%');
    const int to = std::atoi(old.c_str() + percent + 1) + one_of({-9, -3, -2, -1, 1, 2, 5}, rng);
    graph[at] = old.substr(0, percent) + fmt::format("%{}", std::max(0, to));
    return fmt::format("makes {} of {}", graph[at].get<std::string>(), old);
  }
  if (kind == 3) {
    const size_t at = nodes[any(nodes.size(), rng)], next = nodes[any(nodes.size(), rng)];
    std::swap(graph[at], graph[next]);
    return "swaps nodes of the graph";
  }
  const size_t at = nodes[any(nodes.size(), rng)];
  const std::string old = graph[at];
  graph[at] = regraphed(old, rng);
  return fmt::format("makes {} of {}", graph[at].get<std::string>(), old);
}

std::string mutate_reduction(Json* plan, Rng* rng) {
  Json& list = (*plan)["reductions"];
  Json& program = list[any(list.size(), rng)];
  if (rng->chance(0.3)) return "reduction: " + mutate_number(&program["from_bytes"], rng);
  if (program["steps"].empty()) return "";
  Json& step = program["steps"][any(program["steps"].size(), rng)];
  if (rng->chance(0.4)) {
    step["collective"] = one_of<std::string>(
        {"all_reduce", "reduce_scatter", "all_gather", "reduce", "broadcast"}, rng);
    return "reduction by " + step["collective"].get<std::string>();
  }
  return "reduction groups: " + mutate_list(&step["groups"], rng);
}

// What became of a mutant.
enum Verdict : char { unreadable = 'u', unsound = 's', equal = 'e', wrong = 'w' };

// By how much a step of two graphs differs in loss, gradients and new buffers; "" if not at all.
std::string difference(const Graph& one, const Graph& other) {
  const Graph a = in_type(one, DType::f64), b = in_type(other, DType::f64);
  const Feeds feeds = drawn(a, 0);
  const StepResult x = interpret(a, feeds), y = interpret(b, feeds);
  const auto far = [](const at::Tensor& s, const at::Tensor& t) {
    return !at::allclose(s, t, 1e-9, 1e-12);
  };
  if (far(x.loss, y.loss)) return "the loss is another one than before";
  for (const auto& [left, right] :
       {std::pair(&x.gradients, &y.gradients), {&x.updates, &y.updates}})
    for (const auto& [name, tensor] : *left)
      if (right->count(name) == 0 || far(tensor, right->at(name)))
        return name + " has another gradient or new value than before";
  return y.gradients.size() > x.gradients.size() ? "there are more gradients than before" : "";
}

// In a process of its own. `original`: the graph before, where no zoo has it; or null.
void judge(const std::string& text, const Graph* original, int report) {
  alarm(kSeconds);
  set_threads(1);
  char verdict = wrong;
  std::string message;
  try {
    try {
      const Plan plan = parse_plan(text, "mutant");
      verdict = unsound;
      std::vector<std::string> problems = check(plan, /*memory_limit=*/false);
      if (problems.empty()) problems = check_graph(plan);
      if (problems.empty()) {
        verdict = wrong;
        try {
          const Verification v = verify_plan(plan);
          message = fmt::format("loss is off by {}, gradients by {} ({}), buffers by {} ({})",
                                v.loss_error, v.gradient_error, v.worst_parameter, v.buffer_error,
                                v.worst_buffer);
          if (v.equivalent && original != nullptr) message = difference(*original, *plan.graph);
          if (v.equivalent && (original == nullptr || message.empty())) verdict = equal;
        } catch (const std::exception& e) {
          message = e.what();
          message = message.substr(0, message.find('\n'));
        }
      }
    } catch (const UserError&) {
      verdict = verdict == unsound ? wrong : unreadable;
    }
  } catch (const std::exception& e) {
    verdict = wrong;
    message = e.what();
  }
  message = verdict + message;
  if (write(report, message.data(), message.size()) < 0) _exit(1);
  _exit(0);
}

std::string judged(const std::string& text, const Graph* original) {
  int ends[2];
  MOTLEY_CHECK(pipe(ends) == 0);
  const pid_t child = fork();
  MOTLEY_CHECK(child >= 0);
  if (child == 0) {
    close(ends[0]);
    judge(text, original, ends[1]);
  }
  close(ends[1]);
  std::string answer;
  char buffer[4096];
  for (ssize_t n; (n = read(ends[0], buffer, sizeof buffer)) > 0;)
    answer.append(buffer, static_cast<size_t>(n));
  close(ends[0]);
  int status = 0;
  waitpid(child, &status, 0);
  if (!WIFSIGNALED(status)) return answer.empty() ? std::string(1, wrong) + "no answer" : answer;
  return fmt::format("{}{}", static_cast<char>(wrong),
                     WTERMSIG(status) == SIGALRM ? std::string("hangs")
                                                 : fmt::format("signal {}", WTERMSIG(status)));
}

void run(const std::string& command) {
  MOTLEY_CHECK(std::system((command + " >/dev/null").c_str()) == 0, "{}", command);
}

// Captures the model that `arguments` begin with, under a name that the zoo lacks; returns them
// with the file in its place.
std::string own_graph(const std::string& motley, const std::string& arguments,
                      const std::string& file) {
  const std::vector<std::string> words = words_of(arguments);
  run(fmt::format("{} capture {} {} {} -o {}", motley, words[0], words[1], words[2], file));
  Json json = parse_json(read_file(file), file);
  for (Json* text : {&json["graph"], &json["other"]["graph"]}) {
    if (!text->is_string()) continue;
    const std::string graph = *text;
    *text = "model mine" + graph.substr(graph.find('\n'));
  }
  if (!json["other"].contains("batch")) json.erase("other");
  write_file(file, json.dump());
  return file + arguments.substr(words[0].size());
}

}  // namespace

const std::vector<std::string>& mutated_plans() {
  static const std::string gpt = "gpt:layers=2,hidden=16,heads=4,seq=6,vocab=11 --batch 8 ";
  static const std::string mlp = "mlp:layers=3,hidden=16,in=12,classes=8 --batch 16 ";
  static const std::vector<std::string> plans = {
      mlp + "--strategy dp-cp",
      mlp + "--strategy tensor-parallel",
      mlp + "--strategy zero",
      mlp + "--fix pp=2,dp=2,tp=1",
      mlp + "--fix pp=1,dp=4,tp=1,zero=2",
      mlp + "--fix pp=1,dp=4,tp=1,zero=3",
      mlp + "--virtual-devices 2",
      gpt + "--strategy tensor-parallel",
      gpt + "--fix pp=2,dp=1,tp=2",
      gpt + "--fix pp=2,dp=2,tp=1,mbs=2,zero=1",
      gpt + "--fix pp=2,dp=1,tp=1,interleave=2,mbs=2",
      gpt + "--engine pipeline",
      gpt + "--segments 2 --engine spmd",
      "convnet:width=4,image=8,classes=5 --batch 8 --strategy dp-ev",
      "bert-moe:layers=2,hidden=8,heads=2,seq=6,vocab=11,experts=5,every=2 --batch 8 --strategy "
      "expert-parallel",
      // Of graphs of no zoo model, which nothing else says what they ought to be.
      kOwn + mlp + "--strategy tensor-parallel",
      kOwn + gpt + "--strategy dp-cp",
      kOwn + mlp + "--fix pp=2,dp=2,tp=1",
      kOwn + "convnet:width=4,image=8,classes=5 --batch 8 --strategy dp-ev",
  };
  return plans;
}

std::string mutate(Json* plan, Rng* rng) {
  const int changes = rng->chance(0.75) ? 1 : 2 + static_cast<int>(rng->below(2));
  std::string what;
  for (int i = 0; i < changes; ++i) {
    const bool pipeline = plan->contains("pipeline");
    std::string done;
    while (done.empty()) {
      switch (rng->below(8)) {
        case 0:
        case 1:
          done = "graph: " + mutate_graph(plan, rng);
          break;
        case 2:
          if (pipeline) done = mutate_pipeline(plan, rng);
          break;
        case 3:
          if (pipeline)
            done = mutate_stage(&(*plan)["pipeline"], rng);
          else
            done = "ratios: " + mutate_list(&(*plan)["ratios"], rng);
          break;
        case 4:
          if (plan->contains("reductions")) done = mutate_reduction(plan, rng);
          break;
        default:
          done = mutate_program(plan, rng);
      }
    }
    what += (what.empty() ? "" : "; ") + done;
  }
  return what;
}

MutantReport run_mutants(const std::string& motley, const std::string& folder,
                         const std::vector<std::string>& plans, int of_each, uint64_t seed,
                         bool verbose) {
  MutantReport report;
  for (size_t p = 0; p < plans.size(); ++p) {
    const std::string file = fmt::format("{}/plan{}.json", folder, p);
    const bool own = plans[p].starts_with(kOwn);
    const std::string arguments = own ? own_graph(motley, plans[p].substr(kOwn.size()),
                                                  fmt::format("{}/own{}.json", folder, p))
                                      : plans[p];
    run(fmt::format("{} plan {} --cluster local-mixed-4 --memory-limit off -o {}", motley,
                    arguments, file));
    const Json original = parse_json(read_file(file), file);
    const Plan before = parse_plan(original.dump(), file);
    const Graph* graph = own ? before.graph.get() : nullptr;
    const std::string first = judged(original.dump(), graph);
    if (first[0] != equal) report.wrong.push_back(plans[p] + ", as it was planned: " + first);
    Rng rng(seed + 1000 * p);
    int accepted = 0;
    for (int i = 0; i < of_each; ++i) {
      Json mutant = original;
      const std::string what = mutate(&mutant, &rng);
      if (mutant == original) continue;
      const std::string answer = judged(mutant.dump(), graph);
      ++report.mutants;
      report.graphs += what.find("graph: ") != std::string::npos;
      report.unreadable += answer[0] == unreadable;
      report.unsound += answer[0] == unsound;
      report.equal += answer[0] == equal;
      accepted += answer[0] == equal;
      if (answer[0] != wrong) continue;
      report.wrong.push_back(
          fmt::format("{}, mutant {} that {}: {}", plans[p], i, what, answer.substr(1)));
      if (verbose) std::printf("WRONG %s\n", report.wrong.back().c_str());
    }
    if (verbose) {
      std::printf("%-90s %d mutants, %d accepted and equal\n", plans[p].c_str(), of_each, accepted);
      std::fflush(stdout);
    }
  }
  return report;
}

}  // namespace motley
