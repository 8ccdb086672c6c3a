#include "reduce/placement.h"

#include <algorithm>
#include <charconv>
#include <numeric>

#include "cluster/cluster.h"
#include "core/error.h"

namespace motley::reduce {

namespace {

std::vector<std::string> split(const std::string& text, char separator) {
  std::vector<std::string> parts(1);
  for (char c : text)
    if (c == separator)
      parts.emplace_back();
    else
      parts.back() += c;
  return parts;
}

// A whole number in [least, most], or a UserError that names the option.
int number(const std::string& text, int least, int most, const char* option,
           const std::string& whole) {
  int64_t value = 0;
  auto [end, code] = std::from_chars(text.data(), text.data() + text.size(), value);
  if (code != std::errc() || end != text.data() + text.size() || value < least || value > most)
    throw user_error("reduce", "{} is '{}': '{}' is not a whole number from {} to {}", option,
                     whole.substr(0, 200), text.substr(0, 40), least, most);
  return static_cast<int>(value);
}

}  // namespace

Hierarchy parse_hierarchy(const std::string& text) {
  Hierarchy hierarchy;
  int64_t devices = 1;
  for (const std::string& part : split(text, ',')) {
    size_t colon = part.rfind(':');
    Level level;
    level.name = colon == std::string::npos ? fmt::format("level{}", hierarchy.size())
                                            : part.substr(0, colon);
    if (level.name.empty() || level.name.size() > 64)
      throw user_error(
          "reduce", "--hierarchy is '{}': give each level as name:size, for example node:4,gpu:16",
          text.substr(0, 200));
    level.size = number(colon == std::string::npos ? part : part.substr(colon + 1), 1, kMaxDevices,
                        "--hierarchy", text);
    devices *= level.size;
    if (devices > kMaxDevices)
      throw user_error("reduce", "--hierarchy is '{}': more than {} devices; give a smaller system",
                       text.substr(0, 200), kMaxDevices);
    hierarchy.push_back(level);
    if (hierarchy.size() > kMaxLevels)
      throw user_error("reduce", "--hierarchy has more than {} levels; join some", kMaxLevels);
  }
  return hierarchy;
}

std::string to_string(const Hierarchy& hierarchy) {
  std::string text;
  for (const Level& level : hierarchy)
    text += fmt::format("{}{}:{}", text.empty() ? "" : ",", level.name, level.size);
  return text;
}

int devices_of(const Hierarchy& hierarchy) {
  int devices = 1;
  for (const Level& level : hierarchy) devices *= level.size;
  return devices;
}

std::vector<int> parse_axes(const std::string& text, const Hierarchy& hierarchy) {
  std::vector<int> axes;
  int64_t product = 1;
  for (const std::string& part : split(text, ',')) {
    axes.push_back(number(part, 1, kMaxDevices, "--axes", text));
    product = std::min<int64_t>(product * axes.back(), int64_t{kMaxDevices} + 1);
    if (axes.size() > kMaxAxes)
      throw user_error("reduce", "--axes has more than {} axes; join some", kMaxAxes);
  }
  if (product != devices_of(hierarchy))
    throw user_error(
        "reduce",
        "--axes is '{}', for {} devices, but --hierarchy {} has {}; make the products equal", text,
        product > kMaxDevices ? "too many" : std::to_string(product), to_string(hierarchy),
        devices_of(hierarchy));
  return axes;
}

std::vector<int> parse_reduce_axes(const std::string& text, int axes) {
  std::vector<int> reduce;
  for (const std::string& part : split(text, ',')) {
    reduce.push_back(number(part, 0, axes - 1, "--reduce", text));
    if (std::count(reduce.begin(), reduce.end(), reduce.back()) > 1)
      throw user_error("reduce", "--reduce is '{}': axis {} is named twice; name it once", text,
                       reduce.back());
  }
  std::sort(reduce.begin(), reduce.end());
  return reduce;
}

std::string to_string(const Matrix& matrix) {
  std::string text = "[";
  for (int i = 0; i < matrix.axes; ++i) {
    text += i ? " [" : "[";
    for (int j = 0; j < matrix.levels; ++j)
      text += fmt::format("{}{}", j ? " " : "", matrix.at(i, j));
    text += "]";
  }
  return text + "]";
}

std::vector<Matrix> placements(const Hierarchy& hierarchy, const std::vector<int>& axes) {
  Matrix matrix;
  matrix.axes = static_cast<int>(axes.size());
  matrix.levels = static_cast<int>(hierarchy.size());
  matrix.factors.assign(static_cast<size_t>(matrix.axes) * matrix.levels, 1);
  MOTLEY_CHECK(std::accumulate(axes.begin(), axes.end(), int64_t{1}, std::multiplies<>()) ==
               devices_of(hierarchy));
  std::vector<int> left = axes;  // what the levels from here on must still give each axis
  std::vector<Matrix> all;
  // The axes take turns at level j; the last one takes the rest. Since products match, the last
  // level always closes, so that no branch is in vain but those of a last axis that does not
  // divide.
  auto place = [&](auto&& self, int level, int axis, int rest) -> void {
    if (level == matrix.levels) {
      if (static_cast<int64_t>(all.size()) == kMaxPlacements)
        throw user_error(
            "reduce",
            "--hierarchy {} and --axes {} have more than {} placements; use fewer axes or levels",
            to_string(hierarchy), fmt::join(axes, ","), kMaxPlacements);
      all.push_back(matrix);
      return;
    }
    bool last = axis + 1 == matrix.axes;
    for (int f = last ? rest : std::gcd(rest, left[axis]); f >= (last ? rest : 1); --f) {
      if (rest % f != 0 || left[axis] % f != 0) continue;
      matrix.factors[axis * matrix.levels + level] = f;
      left[axis] /= f;
      if (last)
        self(self, level + 1, 0, level + 1 < matrix.levels ? hierarchy[level + 1].size : 1);
      else
        self(self, level, axis + 1, rest / f);
      left[axis] *= f;
    }
  };
  place(place, 0, 0, hierarchy[0].size);
  return all;
}

std::vector<int> reduced_factors(const Matrix& matrix, const std::vector<int>& reduce_axes) {
  std::vector<int> factors(matrix.levels, 1);
  for (int axis : reduce_axes)
    for (int j = 0; j < matrix.levels; ++j) factors[j] *= matrix.at(axis, j);
  return factors;
}

std::vector<std::vector<int>> reduction_groups(const Matrix& matrix,
                                               const std::vector<int>& reduce_axes,
                                               Numbering numbering) {
  // The stride of every digit in the number of a device.
  std::vector<int> stride(matrix.factors.size());
  int devices = 1;
  for (int j = matrix.levels - 1; j >= 0; --j)
    for (int i = matrix.axes - 1; i >= 0; --i) {
      stride[i * matrix.levels + j] = devices;
      devices *= matrix.at(i, j);
    }
  // Digits, most significant first, of the number of a device in its group, and of the others.
  std::vector<int> inner, outer;
  auto reduced = [&](int axis) {
    return std::find(reduce_axes.begin(), reduce_axes.end(), axis) != reduce_axes.end();
  };
  if (numbering == Numbering::axis_major) {
    for (int axis : reduce_axes)
      for (int j = 0; j < matrix.levels; ++j) inner.push_back(axis * matrix.levels + j);
  }
  for (int j = 0; j < matrix.levels; ++j)
    for (int i = 0; i < matrix.axes; ++i) {
      if (!reduced(i)) outer.push_back(i * matrix.levels + j);
      if (reduced(i) && numbering == Numbering::level_major) inner.push_back(i * matrix.levels + j);
    }
  auto numbers = [&](const std::vector<int>& digits) {
    std::vector<int> all = {0};
    for (int digit : digits) {
      std::vector<int> next;
      next.reserve(all.size() * matrix.factors[digit]);
      for (int base : all)
        for (int x = 0; x < matrix.factors[digit]; ++x) next.push_back(base + x * stride[digit]);
      all = std::move(next);
    }
    return all;
  };
  std::vector<int> members = numbers(inner);
  std::vector<std::vector<int>> groups;
  for (int base : numbers(outer)) {
    groups.push_back(members);
    for (int& device : groups.back()) device += base;
  }
  return groups;
}

std::vector<int> devices_by_axis(const Matrix& matrix) {
  std::vector<int> axes(matrix.axes);
  std::iota(axes.begin(), axes.end(), 0);
  return reduction_groups(matrix, axes, Numbering::axis_major)[0];
}

}  // namespace motley::reduce
