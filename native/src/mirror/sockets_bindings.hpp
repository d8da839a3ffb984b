#pragma once

#include <nanobind/nanobind.h>

namespace lastgood {

void bind_mirror_sockets(nanobind::module_& module);

}  // namespace lastgood
