#pragma once

#include <nanobind/nanobind.h>

namespace lastgood {

void bind_ring(nanobind::module_& module);

}  // namespace lastgood
