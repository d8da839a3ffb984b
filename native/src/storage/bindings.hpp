#pragma once

#include <nanobind/nanobind.h>

namespace lastgood {

void bind_storage(nanobind::module_& module);

}  // namespace lastgood
