#pragma once

#include <nanobind/nanobind.h>

namespace lastgood {

void bind_capture(nanobind::module_& module);

}  // namespace lastgood
