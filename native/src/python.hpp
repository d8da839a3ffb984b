// What every folder's bindings share.
#pragma once

#include <nanobind/nanobind.h>
#include <unistd.h>

namespace lastgood {

// Once the interpreter ends, CPython before 3.14 ends every other thread that asks for the GIL by pthread_exit. That
// unwinds the stack, which a destructor does not let through: std::terminate would end the whole process with SIGABRT,
// behind a training that was done. So such a thread stays here until the process ends, as it does since 3.14.
// What `ask` calls is C and throws nothing else.
template <typename Ask>
auto ask_for_gil(Ask ask) noexcept {
    try {
        return ask();
    } catch (...) {
        for (;;) pause();
    }
}

// As nanobind::gil_scoped_release.
class GilReleased {
  public:
    GilReleased() : state_(PyEval_SaveThread()) {}
    ~GilReleased() {
        ask_for_gil([this] { PyEval_RestoreThread(state_); });
    }
    GilReleased(const GilReleased&) = delete;
    GilReleased& operator=(const GilReleased&) = delete;

  private:
    PyThreadState* state_;
};

// As nanobind::gil_scoped_acquire.
class GilHeld {
  public:
    GilHeld() : state_(ask_for_gil([] { return PyGILState_Ensure(); })) {}
    ~GilHeld() { PyGILState_Release(state_); }
    GilHeld(const GilHeld&) = delete;
    GilHeld& operator=(const GilHeld&) = delete;

  private:
    PyGILState_STATE state_;
};

// Lets Python run its signal handlers while the calling thread waits without the GIL.
inline void check_signals() {
    const GilHeld held;
    if (PyErr_CheckSignals() != 0) throw nanobind::python_error();
}

}  // namespace lastgood
