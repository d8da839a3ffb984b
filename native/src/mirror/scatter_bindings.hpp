#pragma once

#include <nanobind/nanobind.h>

namespace lastgood {

void bind_scatter(nanobind::module_& module);

}  // namespace lastgood
