#include "sparse/blocks_bindings.hpp"

#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <optional>
#include <tuple>
#include <vector>

#include "python.hpp"
#include "sparse/blocks.hpp"

namespace nb = nanobind;
using namespace nb::literals;

namespace lastgood {
namespace {

// Fewer take less time than another thread may keep the GIL for once it is given away.
constexpr std::uint64_t kFewBytes = 8192;

using PartTuple = std::tuple<std::uintptr_t, std::uint64_t, std::uintptr_t, unsigned, unsigned, bool, std::uint64_t>;
using FoundTuple = std::tuple<std::uint64_t, std::uint64_t, unsigned, unsigned, bool>;

std::vector<SparsePart> parts_of(const std::vector<PartTuple>& given) {
    std::vector<SparsePart> parts;
    parts.reserve(given.size());
    for (const auto& [indices, count, values, type, width, finite, elements] : given)
        parts.push_back({reinterpret_cast<const std::uint32_t*>(indices), count, reinterpret_cast<const void*>(values), type,
                         width, finite, elements});
    return parts;
}

std::uint64_t bytes(const std::vector<PartTuple>& given) { return group_bytes(parts_of(given)); }

bool write(const std::vector<PartTuple>& given, std::uintptr_t target, std::uint64_t nbytes) {
    const std::vector<SparsePart> parts = parts_of(given);
    if (nbytes == 0 || group_bytes(parts) != nbytes) return false;
    std::optional<GilReleased> released;
    if (nbytes > kFewBytes) released.emplace();
    return write_group(parts, reinterpret_cast<std::uint8_t*>(target));
}

std::vector<FoundTuple> find(std::uintptr_t source, std::uint64_t nbytes, const std::vector<std::uint64_t>& elements) {
    std::vector<FoundBlock> found;
    std::vector<FoundTuple> told;
    if (!find_blocks(reinterpret_cast<const std::uint8_t*>(source), nbytes, elements, found)) return told;
    for (const FoundBlock& one : found) told.emplace_back(one.values_at, one.count, one.type, one.width, one.finite);
    return told;
}

bool read(std::uintptr_t source, std::uint64_t nbytes, const std::vector<std::uint64_t>& elements, std::uintptr_t indices,
          std::uint64_t count) {
    const auto* const from = reinterpret_cast<const std::uint8_t*>(source);
    std::vector<FoundBlock> found;
    if (!find_blocks(from, nbytes, elements, found)) return false;
    std::uint64_t all = 0;
    for (const FoundBlock& one : found) all += one.count;
    if (all != count) return false;
    std::optional<GilReleased> released;
    if (nbytes > kFewBytes) released.emplace();
    return read_blocks(from, nbytes, elements, found, reinterpret_cast<std::uint32_t*>(indices));
}

}  // namespace

void bind_sparse_blocks(nb::module_& module) {
    module.def("sparse_group_bytes", &bytes, "parts"_a, "Bytes of a group of sparse blocks; 0 if one can be no block.");
    module.def("sparse_write_group", &write, "parts"_a, "target"_a, "nbytes"_a,
               "Write a group of sparse blocks; False if one of them is not valid.");
    module.def("sparse_find_blocks", &find, "source"_a, "nbytes"_a, "elements"_a,
               "What the headers of a group say: (values at, count, type, width, finite) each; nothing if it is no group.");
    module.def("sparse_read_blocks", &read, "source"_a, "nbytes"_a, "elements"_a, "indices"_a, "count"_a,
               "Read all indices of a group, and check all of it; False if it is not valid.");
}

}  // namespace lastgood
