#include "graph/rebatch.h"

#include <cmath>

#include "core/error.h"

namespace motley {

namespace {

class Rebatcher {
 public:
  Rebatcher(const Graph& a, int64_t na, const Graph& b, int64_t nb, int64_t samples,
            const std::string& where)
      : a_(a), b_(b), na_(na), nb_(nb), samples_(samples), where_(where) {
    MOTLEY_CHECK(na != nb && na > 0 && nb > 0 && samples > 0);
  }

  Graph run() {
    if (a_.nodes.size() != b_.nodes.size() || a_.values.size() != b_.values.size())
      throw user_error("graph", "{}: captures at batches {} and {} have {} and {} nodes", where_,
                       na_, nb_, a_.nodes.size(), b_.nodes.size());
    if (a_.loss != b_.loss || a_.outputs != b_.outputs || !same_roles())
      throw user_error("graph", "{}: captures at batches {} and {} differ in their roles", where_,
                       na_, nb_);
    Graph out = a_;
    for (node_ = 0; node_ < a_.nodes.size(); ++node_) {
      const Node &a = a_.nodes[node_], &b = b_.nodes[node_];
      if (a.op != b.op || a.outputs != b.outputs || a.phase != b.phase ||
          a.args.size() != b.args.size())
        fail("is not the same call");
      for (size_t i = 0; i < a.args.size(); ++i)
        out.nodes[node_].args[i] = between(a.args[i], b.args[i]);
    }
    for (size_t v = 0; v < a_.values.size(); ++v) {
      const TensorSpec &a = a_.values[v].spec, &b = b_.values[v].spec;
      node_ = static_cast<size_t>(a_.values[v].producer.index);
      if (a.dtype != b.dtype) fail("makes another dtype");
      out.values[v].spec.shape = between(a.shape, b.shape);
    }
    return out;
  }

 private:
  [[noreturn]] void fail(const std::string& why) const {
    throw user_error("graph", "{}: node {} ({}) {} at batches {} and {}; capture with --batch {}",
                     where_, node_, a_.nodes[node_].op, why, na_, nb_, samples_);
  }

  bool same_roles() const {
    auto same = [](const auto& a, const auto& b, auto equal) {
      bool all = a.size() == b.size();
      for (size_t i = 0; all && i < a.size(); ++i)
        all = a[i].name == b[i].name && a[i].value == b[i].value && equal(a[i], b[i]);
      return all;
    };
    return same(a_.parameters, b_.parameters,
                [](auto& a, auto& b) { return a.gradient == b.gradient; }) &&
           same(a_.buffers, b_.buffers, [](auto& a, auto& b) { return a.update == b.update; }) &&
           same(a_.inputs, b_.inputs, [](auto&, auto&) { return true; });
  }

  // On the straight line through (na, a) and (nb, b).
  int64_t between(int64_t a, int64_t b) const {
    if (a == b) return a;
    const int64_t run = nb_ - na_;
    int64_t rise = 0, result = 0;
    if (__builtin_sub_overflow(b, a, &rise) ||
        __builtin_mul_overflow(rise, samples_ - na_, &rise) || rise % run != 0 ||
        __builtin_add_overflow(a, rise / run, &result) || (a >= 0 && b >= 0 && result < 0))
      fail(fmt::format("has {} and {}", a, b));
    return result;
  }
  double between(double a, double b) const {
    if (a == b || (std::isnan(a) && std::isnan(b))) return a;
    const auto na = static_cast<double>(na_), nb = static_cast<double>(nb_),
               n = static_cast<double>(samples_);
    auto close = [](double x, double y) { return std::abs(x - y) <= 1e-12 * std::abs(x); };
    if (close(a * na, b * nb)) return a * na / n;
    if (close(a / na, b / nb)) return a / na * n;
    fail(fmt::format("has {} and {}", a, b));
  }
  template <typename T>
  std::vector<T> between(const std::vector<T>& a, const std::vector<T>& b) const {
    if (a.size() != b.size()) fail(fmt::format("has lists of {} and {}", a.size(), b.size()));
    std::vector<T> list;
    for (size_t i = 0; i < a.size(); ++i) list.push_back(between(a[i], b[i]));
    return list;
  }
  Arg between(const Arg& a, const Arg& b) const {
    if (a == b) return a;
    if (a.index() == b.index()) {
      if (auto x = std::get_if<int64_t>(&a)) return between(*x, std::get<int64_t>(b));
      if (auto x = std::get_if<double>(&a)) return between(*x, std::get<double>(b));
      if (auto x = std::get_if<std::vector<int64_t>>(&a))
        return between(*x, std::get<std::vector<int64_t>>(b));
      if (auto x = std::get_if<std::vector<double>>(&a))
        return between(*x, std::get<std::vector<double>>(b));
    }
    fail("has another argument");
  }

  const Graph &a_, &b_;
  const int64_t na_, nb_, samples_;
  const std::string& where_;
  size_t node_ = 0;
};

}  // namespace

Graph at_batch(const Graph& a, int64_t na, const Graph& b, int64_t nb, int64_t samples,
               const std::string& where) {
  return Rebatcher(a, na, b, nb, samples, where).run();
}

}  // namespace motley
