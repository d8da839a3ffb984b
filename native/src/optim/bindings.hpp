#pragma once

#include <nanobind/nanobind.h>

namespace lastgood {

void bind_optim(nanobind::module_& module);

}  // namespace lastgood
