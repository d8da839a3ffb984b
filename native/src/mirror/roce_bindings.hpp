#pragma once

#include <nanobind/nanobind.h>

namespace lastgood::mirror {

void bind_roce(nanobind::module_& module);

}  // namespace lastgood::mirror
