#include "sparse/update_bindings.hpp"

#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

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

void update(bool adam, const TensorTuple& given, const std::vector<BlocksTuple>& blocks, double scale, std::uintptr_t rows,
            std::uint64_t steps, std::int32_t base, std::uintptr_t touched, unsigned threads, const std::string& variant) {
    const SparseTensor tensor = tensor_of(adam, given, rows, steps, base, touched);
    std::vector<SparseBlocks> ranks;
    for (const auto& [indices, count, values, type] : blocks)
        ranks.push_back({reinterpret_cast<const std::uint32_t*>(indices), count, reinterpret_cast<const void*>(values),
                         type_of(type)});
    const GilReleased released;
    sparse_update(tensor, ranks, float(scale), threads, variant);
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
    module.def("sparse_catch_up", &catch_up, "adam"_a, "tensor"_a, nb::kw_only(), "rows"_a, "steps"_a, "base"_a, "touched"_a,
               "threads"_a, "variant"_a = "", "All steps that any place missed.");
}

}  // namespace lastgood
