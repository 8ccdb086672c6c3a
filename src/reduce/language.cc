#include "reduce/language.h"

#include <algorithm>
#include <numeric>
#include <set>
#include <utility>

#include "core/error.h"

namespace motley::reduce {

namespace {

std::vector<int64_t> below_of(const std::vector<int>& levels) {
  std::vector<int64_t> below(levels.size(), 1);
  for (size_t i = levels.size() - 1; i-- > 0;) below[i] = below[i + 1] * levels[i + 1];
  return below;
}

}  // namespace

int64_t size_of(const std::vector<int>& levels) {
  return std::accumulate(levels.begin(), levels.end(), int64_t{1}, std::multiplies<>());
}

Groups groups_of(const Form& form, const std::vector<int>& levels) {
  std::vector<int64_t> below = below_of(levels);
  int64_t devices = size_of(levels);
  int64_t stride = form.shape == Shape::inside ? 1 : below[form.slice];
  int64_t block = form.shape == Shape::inside ? below[form.slice] : below[form.ancestor];
  int64_t offsets = form.shape == Shape::parallel ? below[form.slice] : 1;
  Groups groups;
  if (block / stride < 2) return groups;
  groups.reserve(devices / block * offsets);
  for (int64_t start = 0; start < devices; start += block)
    for (int64_t offset = 0; offset < offsets; ++offset) {
      groups.emplace_back();
      groups.back().reserve(block / stride);
      for (int64_t d = start + offset; d < start + block; d += stride)
        groups.back().push_back(static_cast<int>(d));
    }
  return groups;
}

Span span_of(const Form& form, const std::vector<int>& levels) {
  if (form.shape == Shape::inside) return {form.slice + 1, static_cast<int>(levels.size()) - 1};
  return {form.ancestor + 1, form.slice};
}

std::vector<Form> forms_of(const std::vector<int>& levels) {
  int n = static_cast<int>(levels.size());
  std::vector<Form> candidates;
  for (int i = 0; i < n; ++i) candidates.push_back({Shape::inside, i, 0});
  for (Shape shape : {Shape::parallel, Shape::master})
    for (int i = 1; i < n; ++i)
      for (int j = 0; j < i; ++j) candidates.push_back({shape, i, j});
  std::vector<Form> forms;
  std::set<Groups> seen;
  for (const Form& form : candidates) {
    Groups groups = groups_of(form, levels);
    std::sort(groups.begin(), groups.end());
    if (!groups.empty() && seen.insert(std::move(groups)).second) forms.push_back(form);
  }
  return forms;
}

SynthesisHierarchy synthesis_hierarchy(const Hierarchy& hierarchy, const Matrix& matrix,
                                       const std::vector<int>& reduce_axes, HierarchyKind kind,
                                       Numbering numbering) {
  SynthesisHierarchy result;
  result.levels = {1};
  result.source = {-1};
  auto add = [&](int size, int level) {
    if (size == 1) return;
    result.levels.push_back(size);
    result.source.push_back(level);
  };
  std::vector<int> every(matrix.axes);
  std::iota(every.begin(), every.end(), 0);
  switch (kind) {
    case HierarchyKind::system:
      for (int j = 0; j < matrix.levels; ++j) add(hierarchy[j].size, j);
      result.devices = reduction_groups(matrix, every, Numbering::level_major);
      break;
    case HierarchyKind::column:
      for (int j = 0; j < matrix.levels; ++j)
        for (int i = 0; i < matrix.axes; ++i) add(matrix.at(i, j), j);
      result.devices = reduction_groups(matrix, every, Numbering::level_major);
      break;
    case HierarchyKind::row:
      for (int i = 0; i < matrix.axes; ++i)
        for (int j = 0; j < matrix.levels; ++j) add(matrix.at(i, j), j);
      result.devices = reduction_groups(matrix, every, Numbering::axis_major);
      break;
    case HierarchyKind::reduction:
      for (int i : reduce_axes)
        for (int j = 0; j < matrix.levels; ++j) add(matrix.at(i, j), j);
      result.devices = reduction_groups(matrix, reduce_axes, Numbering::axis_major);
      break;
    case HierarchyKind::collapsed: {
      std::vector<int> factors = reduced_factors(matrix, reduce_axes);
      for (int j = 0; j < matrix.levels; ++j) add(factors[j], j);
      result.devices = reduction_groups(matrix, reduce_axes, numbering);
      break;
    }
  }
  return result;
}

Groups lower(const Form& form, const SynthesisHierarchy& hierarchy) {
  Groups pattern = groups_of(form, hierarchy.levels), groups;
  groups.reserve(pattern.size() * hierarchy.devices.size());
  for (const std::vector<int>& copy : hierarchy.devices)
    for (const std::vector<int>& group : pattern) {
      groups.emplace_back();
      groups.back().reserve(group.size());
      for (int number : group) groups.back().push_back(copy[number]);
    }
  return groups;
}

}  // namespace motley::reduce
