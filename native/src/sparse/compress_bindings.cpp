#include "sparse/compress_bindings.hpp"

#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>

#include <map>
#include <optional>
#include <stdexcept>
#include <string>
#include <tuple>

#include "python.hpp"
#include "sparse/compress.hpp"

namespace nb = nanobind;
using namespace nb::literals;

namespace lastgood {
namespace {

template <class Value>
Value named(const std::map<std::string, Value>& values, const std::string& name) {
    const auto found = values.find(name);
    if (found == values.end()) throw std::invalid_argument("compress: no '" + name + "'");
    return found->second;
}

// Fewer take less time than another thread may keep the GIL for once it is given away.
constexpr std::uint64_t kFewElements = 8192;

using Result = std::tuple<bool, bool, std::uint64_t, std::uint32_t, unsigned>;

Result run_compress(const std::string& choice, std::uintptr_t gradient, const std::string& gradient_type,
                    std::uintptr_t residual, std::uintptr_t target, std::uint64_t elements, std::size_t width,
                    const std::string& value_type, std::uint64_t wanted, std::uint64_t middle, std::uint64_t most,
                    std::optional<std::uint32_t> threshold, std::uintptr_t indices, std::uintptr_t values,
                    unsigned threads, std::uint64_t sample, const std::string& variant) {
    static const std::map<std::string, SparseType> types{
        {"float32", SparseType::float32}, {"float16", SparseType::float16}, {"bfloat16", SparseType::bfloat16}};
    static const std::map<std::string, SparseChoice> choices{{"heaviest", SparseChoice::heaviest},
                                                             {"threshold", SparseChoice::threshold},
                                                             {"given", SparseChoice::given},
                                                             {"all", SparseChoice::all}};
    CompressOrder order;
    order.gradient = reinterpret_cast<const void*>(gradient);
    order.gradient_type = named(types, gradient_type);
    order.residual = reinterpret_cast<const float*>(residual);
    order.target = reinterpret_cast<float*>(target);
    order.elements = elements;
    order.width = width;
    order.value_type = named(types, value_type);
    order.choice = named(choices, choice);
    order.wanted = wanted;
    order.middle = middle;
    order.most = most;
    order.has_threshold = threshold.has_value();
    order.threshold = threshold.value_or(0);
    order.indices = reinterpret_cast<std::uint32_t*>(indices);
    order.values = reinterpret_cast<void*>(values);
    order.threads = threads;
    order.sample = sample;
    CompressResult result;
    {
        std::optional<GilReleased> released;
        if (elements > kFewElements) released.emplace();
        result = compress(order, variant);
    }
    return {result.finite, result.held, result.count, result.least, result.reads};
}

void run_draw(std::uint64_t places, std::uint64_t count, std::uint64_t seed, std::uint64_t call, std::uintptr_t indices) {
    const GilReleased released;
    draw_places(places, count, seed, call, reinterpret_cast<std::uint32_t*>(indices));
}

}  // namespace

void bind_compress(nb::module_& module) {
    module.def("sparse_compress", &run_compress, "choice"_a, nb::kw_only(), "gradient"_a, "gradient_type"_a,
               "residual"_a, "target"_a, "elements"_a, "width"_a, "value_type"_a, "wanted"_a, "middle"_a, "most"_a,
               "threshold"_a.none(), "indices"_a, "values"_a, "threads"_a, "sample"_a = 0, "variant"_a = "",
               "Choose places of gradient + residual; return (finite, held, count, least weight, reads).");
    module.def("sparse_draw", &run_draw, "places"_a, "count"_a, "seed"_a, "call"_a, "indices"_a,
               "Write `count` different places, ascending, that seed and call draw.");
}

}  // namespace lastgood
