// lastgood._native: each folder under src/ adds its own functions.
#include <nanobind/nanobind.h>

#include "capture/bindings.hpp"
#include "mirror/roce_bindings.hpp"
#include "mirror/scatter_bindings.hpp"
#include "mirror/sockets_bindings.hpp"
#include "optim/bindings.hpp"
#include "process/bindings.hpp"
#include "sparse/blocks_bindings.hpp"
#include "sparse/compress_bindings.hpp"
#include "sparse/indices_bindings.hpp"
#include "sparse/update_bindings.hpp"
#include "storage/bindings.hpp"
#include "wire/bindings.hpp"
#include "wire/ring_bindings.hpp"

NB_MODULE(_native, module) {
    module.doc() = "Lastgood's native kernels. Memory crosses the border as integer addresses and byte counts.";
    // Objects that a training script still holds at exit are no news to its user.
    nanobind::set_leak_warnings(false);
    lastgood::bind_storage(module);
    lastgood::bind_optim(module);
    lastgood::bind_wire(module);
    lastgood::bind_ring(module);
    lastgood::bind_process(module);
    lastgood::bind_compress(module);
    lastgood::bind_sparse_blocks(module);
    lastgood::bind_sparse_indices(module);
    lastgood::bind_sparse_update(module);
    lastgood::bind_capture(module);
    lastgood::mirror::bind_roce(module);
    lastgood::bind_mirror_sockets(module);
    lastgood::bind_scatter(module);
}
