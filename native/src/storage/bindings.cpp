#include "storage/bindings.hpp"

#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <memory>
#include <stdexcept>
#include <tuple>
#include <utility>
#include <vector>

#include "python.hpp"
#include "storage/chunk_pool.hpp"
#include "storage/crc32c.hpp"
#include "storage/os_io.hpp"
#include "storage/persistent_memory.hpp"
#include "storage/slot_reader.hpp"
#include "storage/slot_writer.hpp"

namespace nb = nanobind;
using namespace nb::literals;

namespace lastgood {
namespace {

constexpr std::size_t kHoldGilBelow = 4096;  // so short that giving the GIL back would cost more

// A view of a bytes-like object, for as long as it lives.
class BufferView {
  public:
    explicit BufferView(nb::handle object) {
        if (PyObject_GetBuffer(object.ptr(), &view_, PyBUF_SIMPLE) != 0) throw nb::python_error();
    }
    ~BufferView() { PyBuffer_Release(&view_); }
    BufferView(const BufferView&) = delete;
    BufferView& operator=(const BufferView&) = delete;
    const void* data() const { return view_.buf; }
    std::size_t nbytes() const { return std::size_t(view_.len); }

  private:
    Py_buffer view_;
};

template <class Function>
auto without_gil(std::size_t nbytes, Function&& function) {
    if (nbytes < kHoldGilBelow) return function();
    const GilReleased released;
    return function();
}

std::uint32_t sum_buffer(nb::handle data, std::uint32_t seed, const std::string& variant) {
    const Crc32cVariant& way = crc32c_variant(variant);
    const BufferView view(data);
    return without_gil(view.nbytes(), [&] { return way.sum(view.data(), view.nbytes(), seed); });
}

std::uint32_t sum_address(std::uintptr_t address, std::size_t nbytes, std::uint32_t seed, const std::string& variant) {
    const Crc32cVariant& way = crc32c_variant(variant);
    return without_gil(nbytes, [&] { return way.sum(reinterpret_cast<const void*>(address), nbytes, seed); });
}

std::uint32_t copy_address(std::uintptr_t target, std::uintptr_t source, std::size_t nbytes, std::uint32_t seed,
                           const std::string& variant) {
    const Crc32cVariant& way = crc32c_variant(variant);
    return without_gil(nbytes, [&] {
        return way.copy(reinterpret_cast<void*>(target), reinterpret_cast<const void*>(source), nbytes, seed);
    });
}

// The pool as Python holds it. Threads share the pool itself, so that none needs the GIL to let go of it.
struct PoolHandle {
    std::shared_ptr<ChunkPool> pool;
};

// A mapping as Python holds it, and its writers' threads with it.
struct MappingHandle {
    std::shared_ptr<PersistentMapping> mapping;
};

// The writer as Python holds it: its threads are ended without the GIL.
class WriterHandle : public SlotWriter {
  public:
    using SlotWriter::SlotWriter;
    ~WriterHandle() {
        // Taking the GIL again ends the process where a background thread does it while the interpreter ends, so it is
        // kept unless there is something to wait for.
        if (forked() || join(deadline_after(0.0))) return;
        const GilReleased released;
        shut_down();
    }
};

std::vector<Range> to_ranges(const std::vector<std::pair<std::uintptr_t, std::uint64_t>>& pairs) {
    std::vector<Range> ranges;
    ranges.reserve(pairs.size());
    for (const auto& [address, nbytes] : pairs) ranges.push_back({address, nbytes});
    return ranges;
}

// Tables of checksums cross the border packed, as they lie on the disk: little-endian.
nb::bytes pack_table(const std::vector<std::uint32_t>& table) {
    std::string packed;
    packed.reserve(4 * table.size());
    for (const std::uint32_t value : table)
        for (int byte = 0; byte < 4; ++byte) packed.push_back(char(value >> (8 * byte)));
    return nb::bytes(packed.data(), packed.size());
}

std::vector<std::uint32_t> unpack_table(const nb::bytes& packed) {
    if (packed.size() % 4 != 0) throw std::invalid_argument("read_verify: a table is a whole number of 4-byte words");
    const auto* at = reinterpret_cast<const unsigned char*>(packed.c_str());
    std::vector<std::uint32_t> table(packed.size() / 4);
    for (std::size_t index = 0; index < table.size(); ++index, at += 4)
        table[index] =
            std::uint32_t(at[0]) | std::uint32_t(at[1]) << 8 | std::uint32_t(at[2]) << 16 | std::uint32_t(at[3]) << 24;
    return table;
}

void translate(const std::exception_ptr& thrown, void*) {
    try {
        std::rethrow_exception(thrown);
    } catch (const OsError& reason) {
        nb::object error = nb::steal(PyObject_CallFunction(PyExc_OSError, "is", reason.number, reason.what()));
        if (!error.is_valid()) return;
        error.attr("operation") = reason.operation;
        error.attr("offset") = reason.offset;
        error.attr("nbytes") = reason.nbytes;
        PyErr_SetObject(reinterpret_cast<PyObject*>(Py_TYPE(error.ptr())), error.ptr());
    } catch (const WaitEnded& reason) {
        PyErr_SetString(PyExc_TimeoutError, reason.what());
    }
}

}  // namespace

void bind_storage(nb::module_& module) {
    nb::register_exception_translator(translate);

    module.def("crc32c", &sum_buffer, "data"_a, "seed"_a = 0, nb::kw_only(), "variant"_a = "",
               "CRC32C of a bytes-like object, going on from the checksum `seed`.");
    module.def("crc32c_at", &sum_address, "address"_a, "nbytes"_a, "seed"_a = 0, nb::kw_only(), "variant"_a = "",
               "CRC32C of `nbytes` of memory at `address`, going on from the checksum `seed`.");
    module.def(
        "crc32c_portable", [](nb::handle data, std::uint32_t seed) { return sum_buffer(data, seed, "portable"); },
        "data"_a, "seed"_a = 0, "CRC32C by tables alone: the twin that the fast ones are held to.");
    module.def("copy_crc32c", &copy_address, "target"_a, "source"_a, "nbytes"_a, "seed"_a = 0, nb::kw_only(),
               "variant"_a = "",
               "Copy `nbytes` between two addresses and return their CRC32C, in one pass over memory.");
    module.def(
        "crc32c_variants",
        [] {
            std::vector<std::string> names;
            for (const Crc32cVariant& variant : crc32c_variants()) names.emplace_back(variant.name);
            return names;
        },
        "Names of the CRC32C variants that this CPU can run, fastest first.");
    module.def(
        "crc32c_implementation", [] { return crc32c_variants().front().name; },
        "Name of the CRC32C variant that is used on this CPU.");
    module.def("chunk_seed", &chunk_seed, "sequence"_a, "index"_a,
               "The seed of a chunk's checksum: CRC32C over sequence and index, both little-endian 64-bit.");

    nb::class_<PoolHandle>(module, "ChunkPool")
        .def(
            "__init__",
            [](PoolHandle* self, std::uintptr_t address, std::size_t nbytes, std::size_t chunk_bytes, nb::handle) {
                const GilReleased released;
                new (self) PoolHandle{std::make_shared<ChunkPool>(address, nbytes, chunk_bytes)};
            },
            "address"_a, "nbytes"_a, "chunk_bytes"_a, "owner"_a.none() = nb::none(), nb::keep_alive<1, 5>(),
            "Cut `nbytes` at `address` (0: memory of its own) into buffers of `chunk_bytes`; `owner` is kept alive.")
        .def_prop_ro("address", [](const PoolHandle& self) { return self.pool->address(); })
        .def_prop_ro("chunk_bytes", [](const PoolHandle& self) { return self.pool->chunk_bytes(); })
        .def_prop_ro("count", [](const PoolHandle& self) { return self.pool->count(); })
        .def_prop_ro("free", [](const PoolHandle& self) { return self.pool->free_count(); });

    nb::class_<MappingHandle>(module, "PersistentMapping")
        .def(
            "__init__",
            [](MappingHandle* self, int fd, std::uint64_t nbytes) {
                const GilReleased released;
                new (self) MappingHandle{std::make_shared<PersistentMapping>(fd, nbytes)};
            },
            "fd"_a, "nbytes"_a)
        .def(
            "write",
            [](MappingHandle& self, nb::handle data, std::uint64_t offset) {
                const BufferView view(data);
                const std::atomic<bool> never{false};
                without_gil(view.nbytes(),
                            [&] { return self.mapping->write(view.data(), view.nbytes(), offset, never); });
            },
            "data"_a, "offset"_a)
        .def(
            "flush", [](MappingHandle& self) { self.mapping->flush(); }, nb::call_guard<GilReleased>())
        .def_prop_ro("how", [](const MappingHandle& self) { return self.mapping->how(); });

    nb::class_<WriterHandle>(module, "SlotWriter")
        .def(
            "__init__",
            [](WriterHandle* self, const PoolHandle& pool, int fd, std::uint64_t data_offset,
               std::uint64_t stream_bytes, std::uint64_t chunk_bytes, std::uint64_t sequence, unsigned writer_threads,
               const std::vector<int>& cpus, const std::string& checksum, const MappingHandle* mapping) {
                const WriteOptions options{writer_threads, cpus, checksum, mapping ? mapping->mapping : nullptr};
                new (self) WriterHandle(pool.pool, fd, data_offset, stream_bytes, chunk_bytes, sequence, options);
            },
            "pool"_a, "fd"_a, "data_offset"_a, "stream_bytes"_a, "chunk_bytes"_a, "sequence"_a, "writer_threads"_a,
            "cpus"_a = std::vector<int>(), "checksum"_a = "", "mapping"_a.none() = nb::none(), nb::keep_alive<1, 2>())
        .def(
            "copy_host",
            [](WriterHandle& self, const std::vector<std::pair<std::uintptr_t, std::uint64_t>>& ranges,
               double timeout_s, unsigned threads) {
                const GilReleased released;
                self.copy_host(to_ranges(ranges), deadline_after(timeout_s), threads, check_signals);
            },
            "ranges"_a, "timeout_s"_a, "threads"_a = 1)
        .def(
            "acquire",
            [](WriterHandle& self, double timeout_s) {
                AcquiredChunk chunk;
                {
                    const GilReleased released;
                    chunk = self.acquire(deadline_after(timeout_s), check_signals);
                }
                return std::make_tuple(chunk.address, chunk.index, chunk.nbytes);
            },
            "timeout_s"_a)
        .def("put", &WriterHandle::put, "chunk_index"_a)
        .def(
            "finish",
            [](WriterHandle& self, double timeout_s) {
                std::vector<std::uint32_t> table;
                {
                    const GilReleased released;
                    table = self.finish(deadline_after(timeout_s), check_signals);
                }
                return pack_table(table);
            },
            "timeout_s"_a)
        .def("abort", &WriterHandle::abort, nb::call_guard<GilReleased>())
        .def(
            "join", [](WriterHandle& self, double timeout_s) { return self.join(deadline_after(timeout_s)); },
            "timeout_s"_a, nb::call_guard<GilReleased>())
        .def("release", &WriterHandle::release, nb::call_guard<GilReleased>())
        .def_prop_ro("position", &WriterHandle::position)
        .def_prop_ro("stream_bytes", &WriterHandle::stream_bytes);

    module.def(
        "read_verify",
        [](int fd, std::uint64_t data_offset, std::uint64_t stream_bytes, std::uint64_t chunk_bytes,
           std::uint64_t sequence, const nb::bytes& table,
           const std::vector<std::pair<std::uintptr_t, std::uint64_t>>& ranges, std::uint64_t first_chunk,
           unsigned threads,
           double timeout_s) -> std::optional<std::tuple<std::uint64_t, std::uint32_t, std::uint32_t>> {
            const std::vector<std::uint32_t> sums = unpack_table(table);
            std::optional<BadChunk> bad;
            {
                const GilReleased released;
                bad = read_verify({fd, data_offset, stream_bytes, chunk_bytes, sequence}, sums, to_ranges(ranges),
                                  first_chunk, threads, deadline_after(timeout_s), check_signals);
            }
            if (!bad) return std::nullopt;
            return std::make_tuple(bad->index, bad->expected, bad->found);
        },
        "fd"_a, "data_offset"_a, "stream_bytes"_a, "chunk_bytes"_a, "sequence"_a, "table"_a, "ranges"_a,
        "first_chunk"_a, "threads"_a, "timeout_s"_a,
        "Read and check chunks and scatter them; returns (index, expected, found) of the first bad chunk, or None.");

    module.def("prefill", &prefill, "fd"_a, "offset"_a, "nbytes"_a, nb::call_guard<GilReleased>(),
               "Write zeros over a range of whole 4096-byte blocks.");
}

}  // namespace lastgood
