#pragma once

#include <nanobind/nanobind.h>

namespace lastgood {

void bind_sparse_blocks(nanobind::module_& module);

}  // namespace lastgood
