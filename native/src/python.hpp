// What every folder's bindings share.
#pragma once

#include <nanobind/nanobind.h>

namespace lastgood {

// Lets Python run its signal handlers while the calling thread waits without the GIL.
inline void check_signals() {
    const nanobind::gil_scoped_acquire held;
    if (PyErr_CheckSignals() != 0) throw nanobind::python_error();
}

}  // namespace lastgood
