// What the files of the extension share. One file per area; module.cc calls them in order.
#pragma once

#include <pybind11/functional.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>
#include <torch/csrc/utils/pybind.h>

#include <memory>
#include <string>
#include <vector>

#include "capture/capture.h"
#include "graph/graph.h"
#include "plan/plan.h"

namespace motley::python {

namespace py = pybind11;

// A canonical graph with what is known of its making.
struct CapturedGraph {
  Graph graph;
  int64_t batch = 0;
  double seconds = 0;
  std::vector<std::string> unknown_ops;
  std::vector<at::Tensor> outside;    // read as constants; capture.h
  std::vector<Preparation> prepared;  // of parameters, before every step
};

void bind_graph(py::module_& m);
void bind_guard(py::module_& m);
void bind_plan(py::module_& m);
void bind_random(py::module_& m);
void bind_worker(py::module_& m);

}  // namespace motley::python
