#pragma once

#include <nanobind/nanobind.h>

namespace lastgood {

void bind_process(nanobind::module_& module);

}  // namespace lastgood
