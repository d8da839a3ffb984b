#pragma once

#include <nanobind/nanobind.h>

namespace lastgood {

void bind_compress(nanobind::module_& module);

}  // namespace lastgood
