#include "sparse/update_bindings.hpp"

#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <optional>
#include <stdexcept>
#include <string>
#include <tuple>
#include <vector>

#include "python.hpp"
#include "sparse/update.hpp"

namespace nb = nanobind;
using namespace nb::literals;

namespace lastgood {
namespace {

// Fewer take less time than another thread may keep the GIL for once it is given away.
constexpr std::uint64_t kFewValues = 2048;

using TensorTuple = std::tuple<std::uintptr_t, std::uintptr_t, std::uintptr_t, std::uint64_t, unsigned>;
using BlocksTuple = std::tuple<std::uintptr_t, std::uint64_t, std::uintptr_t, std::string>;

SparseTensor tensor_of(bool adam, const TensorTuple& given, std::uintptr_t rows, std::uint64_t steps, std::int32_t base,
                       std::uintptr_t touched) {
    const auto& [parameter, first, second, elements, width] = given;
    SparseTensor tensor;
    tensor.adam = adam;
    tensor.parameter = reinterpret_cast<float*>(parameter);
    tensor.first = reinterpret_cast<float*>(first);
    tensor.second = reinterpret_cast<float*>(second);
    tensor.elements = elements;
    tensor.width = width;
    tensor.rows = reinterpret_cast<const double*>(rows);
    tensor.steps = steps;
    tensor.base = base;
    tensor.touched = reinterpret_cast<std::int32_t*>(touched);
    return tensor;
}

SparseValues type_of(const std::string& name) {
    if (name == "float32") return SparseValues::float32;
    if (name == "float16") return SparseValues::float16;
    if (name == "bfloat16") return SparseValues::bfloat16;
    throw std::invalid_argument("values of " + name);
}

std::vector<SparseBlocks> ranks_of(const std::vector<BlocksTuple>& blocks) {
    std::vector<SparseBlocks> ranks;
    ranks.reserve(blocks.size());
    for (const auto& [indices, count, values, type] : blocks)
        ranks.push_back({reinterpret_cast<const std::uint32_t*>(indices), count, reinterpret_cast<const void*>(values),
                         type_of(type)});
    return ranks;
}

std::uint64_t values_of(const SparseTensor& tensor, const std::vector<SparseBlocks>& ranks) {
    std::uint64_t sent = 0;
    for (const SparseBlocks& one : ranks) sent += one.count * tensor.width;
    return sent;
}

void update(bool adam, const TensorTuple& given, const std::vector<BlocksTuple>& blocks, double scale, std::uintptr_t rows,
            std::uint64_t steps, std::int32_t base, std::uintptr_t touched, unsigned threads, const std::string& variant) {
    const SparseTensor tensor = tensor_of(adam, given, rows, steps, base, touched);
    const std::vector<SparseBlocks> ranks = ranks_of(blocks);
    std::optional<GilReleased> released;
    if (values_of(tensor, ranks) > kFewValues || steps > 1) released.emplace();
    sparse_update(tensor, ranks, float(scale), threads, variant);
}

void update_all(bool adam, const std::vector<TensorTuple>& given, const std::vector<std::vector<BlocksTuple>>& blocks,
                double scale, std::uintptr_t rows, unsigned threads, const std::string& variant) {
    std::vector<SparseTensor> tensors;
    std::vector<std::vector<SparseBlocks>> ranks;
    for (std::size_t at = 0; at < given.size(); ++at)
        tensors.push_back(tensor_of(adam, given[at], rows + at * kRowNumbers * sizeof(double), 1, 0, 0));
    for (const auto& one : blocks) ranks.push_back(ranks_of(one));
    const GilReleased released;
    sparse_update_all(tensors, ranks, float(scale), threads, variant);
}

void catch_up(bool adam, const TensorTuple& given, std::uintptr_t rows, std::uint64_t steps, std::int32_t base,
              std::uintptr_t touched, unsigned threads, const std::string& variant) {
    const SparseTensor tensor = tensor_of(adam, given, rows, steps, base, touched);
    const GilReleased released;
    sparse_catch_up(tensor, threads, variant);
}

}  // namespace

void bind_sparse_update(nb::module_& module) {
    module.def("sparse_update", &update, "adam"_a, "tensor"_a, "blocks"_a, nb::kw_only(), "scale"_a, "rows"_a, "steps"_a,
               "base"_a, "touched"_a, "threads"_a, "variant"_a = "",
               "One step of SGD or Adam at the places that some rank sent, and before it those that each place missed.");
    module.def("sparse_update_all", &update_all, "adam"_a, "tensors"_a, "blocks"_a, nb::kw_only(), "scale"_a, "rows"_a,
               "threads"_a, "variant"_a = "", "One step of each of several tensors, if all are valid.");
    module.def("sparse_catch_up", &catch_up, "adam"_a, "tensor"_a, nb::kw_only(), "rows"_a, "steps"_a, "base"_a, "touched"_a,
               "threads"_a, "variant"_a = "", "All steps that any place missed.");
}

}  // namespace lastgood
