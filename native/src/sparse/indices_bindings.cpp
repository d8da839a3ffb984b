#include "sparse/indices_bindings.hpp"

#include <optional>
#include <stdexcept>

#include "python.hpp"
#include "sparse/indices.hpp"

namespace nb = nanobind;
using namespace nb::literals;

namespace lastgood {
namespace {

// Fewer take less time than another thread may keep the GIL for once it is given away.
constexpr std::uint64_t few = 8192;

IndexCoding checked(unsigned coding, std::uint64_t places, std::uint64_t count, std::uint64_t nbytes) {
    if (coding > 4) throw std::invalid_argument("indices in no coding");
    const auto found = static_cast<IndexCoding>(coding);
    if (index_bytes(found, places, count) != nbytes) throw std::invalid_argument("indices of another length");
    return found;
}

void write(unsigned coding, std::uintptr_t indices, std::uint64_t count, std::uint64_t places, std::uintptr_t target,
           std::uint64_t nbytes) {
    const IndexCoding known = checked(coding, places, count, nbytes);
    std::optional<GilReleased> released;
    if (nbytes > few) released.emplace();
    write_indices(known, reinterpret_cast<const std::uint32_t*>(indices), count, places,
                  reinterpret_cast<std::uint8_t*>(target));
}

bool read(unsigned coding, std::uintptr_t source, std::uint64_t nbytes, std::uint64_t places, std::uint64_t count,
          std::uintptr_t target) {
    const IndexCoding known = checked(coding, places, count, nbytes);
    std::optional<GilReleased> released;
    if (nbytes > few || count > few) released.emplace();
    return read_indices(known, reinterpret_cast<const std::uint8_t*>(source), places, count,
                        reinterpret_cast<std::uint32_t*>(target));
}

}  // namespace

void bind_sparse_indices(nb::module_& module) {
    module.def("sparse_write_indices", &write, "coding"_a, "indices"_a, "count"_a, "places"_a, "target"_a, "nbytes"_a,
               "Write ascending indices in a coding of sparse blocks.");
    module.def("sparse_read_indices", &read, "coding"_a, "source"_a, "nbytes"_a, "places"_a, "count"_a, "target"_a,
               "Read indices of a coding of sparse blocks; False if they are not as many as they should be.");
}

}  // namespace lastgood
