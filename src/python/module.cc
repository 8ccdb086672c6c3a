// motley._motley: the C++ modules as the package python/motley uses them. Not an interface for
// users.
#include "comm/gloo.h"
#include "core/error.h"
#include "core/log.h"
#include "python/bindings.h"

namespace motley::python {

PYBIND11_MODULE(_motley, m) {
  py::register_exception<UserError>(m, "UserError", PyExc_ValueError);
  py::register_exception<PeerLost>(m, "PeerLost", PyExc_ConnectionError);
  bind_graph(m);
  bind_guard(m);
  bind_plan(m);
  bind_random(m);
  bind_worker(m);
}

}  // namespace motley::python
