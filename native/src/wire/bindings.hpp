// Python's names for what lies in wire/.
#pragma once

#include <nanobind/nanobind.h>

namespace lastgood {

void bind_wire(nanobind::module_& module);

}  // namespace lastgood
