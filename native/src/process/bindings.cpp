#include "process/bindings.hpp"

#include <system_error>

#include "process/end_watch.hpp"
#include "python.hpp"

namespace nb = nanobind;

namespace lastgood {

void bind_process(nb::module_& module) {
    module.def(
        "end_watch_begin",
        [] {
            try {
                return end_watch_begin();
            } catch (const std::system_error& error) {
                errno = error.code().value();
                PyErr_SetFromErrno(PyExc_OSError);
                throw nb::python_error();
            }
        },
        "Wake a thread too at SIGTERM; returns the descriptor of which 8 bytes can be read once the main thread did not\n"
        "answer. In the main thread only, when Python's handler is set.");
    module.def("end_watch_limits", &end_watch_limits, nb::arg("patience_s"), nb::arg("limit_s"),
               "How long to wait for an answer, and after how long, from SIGTERM on, the process ends in any case.");
    module.def("end_watch_answered", &end_watch_answered, "The main thread ends the process in its own way.");
    module.def("end_watch_done", &end_watch_done, "End the process now.");
    module.def("end_watch_stop", &end_watch_stop, "Put the former handler of SIGTERM back.");
}

}  // namespace lastgood
