#include "wire/ring_bindings.hpp"

#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <tuple>
#include <vector>

#include "python.hpp"
#include "wire/ring.hpp"

namespace nb = nanobind;
using namespace nb::literals;

namespace lastgood {
namespace {

using StepTuple = std::tuple<std::uint32_t, bool, bool>;
using RangeTuple = std::tuple<std::uint64_t, std::uint32_t, std::uint64_t>;

std::vector<RingStep> to_steps(const std::vector<StepTuple>& tuples) {
    std::vector<RingStep> steps;
    steps.reserve(tuples.size());
    for (const auto& [chunk, final, marked] : tuples) steps.push_back({chunk, final, marked});
    return steps;
}

// What stays the same from iteration to iteration: made once for each tensor of a training.
struct PlanHandle {
    PlanHandle(std::uint8_t dtype, std::uint8_t divide, std::vector<std::uint64_t> chunk_bytes,
               const std::vector<RangeTuple>& ranges, const std::vector<StepTuple>& own,
               const std::vector<StepTuple>& previous, std::uint64_t segment_bytes) {
        if (divide > std::uint8_t(Divide::after)) throw std::invalid_argument("ring: divide is 0, 1 or 2");
        plan.dtype = dtype;
        plan.divide = Divide(divide);
        plan.chunk_bytes = std::move(chunk_bytes);
        plan.ranges.reserve(ranges.size());
        for (const auto& [nbytes, bucket, offset] : ranges) plan.ranges.push_back({nbytes, bucket, offset});
        plan.own = to_steps(own);
        plan.previous = to_steps(previous);
        plan.segment_bytes = segment_bytes;
    }
    RingPlan plan;
};

}  // namespace

void bind_ring(nb::module_& module) {
    nb::exception<OutOfStep>(module, "OutOfStep");
    nb::exception<DamagedRecord>(module, "DamagedRecord");

    module.def(
        "ring_add",
        [](std::uint8_t dtype, std::uintptr_t target, std::uintptr_t source, std::size_t elements) {
            const GilReleased released;
            add_elements(dtype, reinterpret_cast<void*>(target), reinterpret_cast<const void*>(source), elements);
        },
        "dtype"_a, "target"_a, "source"_a, "elements"_a, "target[i] = source[i] + target[i], rounded to the type.");
    module.def(
        "ring_divide",
        [](std::uint8_t dtype, std::uintptr_t target, std::size_t elements, std::uint32_t divisor) {
            const GilReleased released;
            divide_elements(dtype, reinterpret_cast<void*>(target), elements, divisor);
        },
        "dtype"_a, "target"_a, "elements"_a, "divisor"_a, "target[i] = target[i] / divisor, rounded to the type.");

    nb::class_<PlanHandle>(module, "RingPlan", "How one tensor goes around a ring; see lastgood.wire.ring_comm.")
        .def(nb::init<std::uint8_t, std::uint8_t, std::vector<std::uint64_t>, const std::vector<RangeTuple>&,
                      const std::vector<StepTuple>&, const std::vector<StepTuple>&, std::uint64_t>(),
             "dtype"_a, "divide"_a, "chunk_bytes"_a, "ranges"_a, "own"_a, "previous"_a, "segment_bytes"_a);

    nb::class_<Ring>(module, "Ring", "One rank's side of a ring all-reduce over two connections.")
        .def(nb::init<int, int, std::uint64_t, std::uint32_t, std::uint32_t, std::uint32_t, std::string, std::string,
                      double>(),
             "previous_fd"_a, "next_fd"_a, "job"_a, "epoch"_a, "rank"_a, "ranks"_a, "previous_name"_a, "next_name"_a,
             "timeout_s"_a)
        .def(
            "all_reduce",
            [](Ring& ring, const PlanHandle& handle, std::uintptr_t address, std::uint64_t iteration) {
                const GilReleased released;
                ring.all_reduce(handle.plan, address, iteration, check_signals);
            },
            "plan"_a, "address"_a, "iteration"_a, "Reduce the tensor at `address` in place.")
        .def(
            "end",
            [](Ring& ring, std::uint64_t iteration) {
                const GilReleased released;
                ring.end(iteration, check_signals);
            },
            "iteration"_a, "Exchange ends of iteration with the neighbours.")
        .def("shut_down", &Ring::shut_down, "Make every call fail, now and later.")
        .def_prop_ro("sent_bytes", &Ring::sent_bytes, "Bytes handed to the kernel, headers included.")
        .def_prop_ro("sent_records", &Ring::sent_records, "Records sent, ends included.")
        .def_prop_ro("marked_bytes", &Ring::marked_bytes, "Payload bytes sent with the final mark.");
}

}  // namespace lastgood
