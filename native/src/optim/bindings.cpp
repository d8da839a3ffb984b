#include "optim/bindings.hpp"

#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <map>
#include <stdexcept>
#include <string>
#include <tuple>
#include <vector>

#include "python.hpp"
#include "optim/device_step.hpp"
#include "optim/host_adam.hpp"
#include "optim/steps.hpp"

namespace nb = nanobind;
using namespace nb::literals;

namespace lastgood {
namespace {

template <class Value>
Value named(const std::map<std::string, Value>& values, const std::string& name, const char* what) {
    const auto found = values.find(name);
    if (found != values.end()) return found->second;
    std::string known;
    for (const auto& [key, value] : values) known += (known.empty() ? "" : ", ") + key;
    throw std::invalid_argument("device_step: no " + std::string(what) + " '" + name + "'; there are: " + known);
}

using TensorTuple = std::tuple<std::uintptr_t, std::uintptr_t, std::uintptr_t, std::uintptr_t, std::uintptr_t,
                               std::uint64_t, double, double, bool, bool>;

void run_step(const std::vector<TensorTuple>& tensors, const std::string& kind, const std::string& family,
              const std::string& dtype, const std::string& decay, double lr, double weight_decay, double beta1,
              double beta2, double eps, double momentum, double dampening, bool nesterov, bool maximize,
              const std::vector<double>& factors, double limit, double divisor, unsigned lanes, unsigned threads,
              const std::string& variant) {
    static const std::map<std::string, bool> kinds{{"adam", true}, {"sgd", false}};
    static const std::map<std::string, DeviceFamily> families{
        {"foreach", DeviceFamily::foreach}, {"single", DeviceFamily::single}, {"fused", DeviceFamily::fused}};
    static const std::map<std::string, DeviceType> types{{"float32", DeviceType::float32},
                                                         {"float64", DeviceType::float64},
                                                         {"bfloat16", DeviceType::bfloat16}};
    static const std::map<std::string, DeviceDecay> decays{
        {"none", DeviceDecay::none}, {"l2", DeviceDecay::l2}, {"decoupled", DeviceDecay::decoupled}};
    DeviceStep step;
    step.adam = named(kinds, kind, "kind");
    step.family = named(families, family, "family");
    step.type = named(types, dtype, "dtype");
    step.decay = named(decays, decay, "decay");
    step.maximize = maximize;
    step.nesterov = nesterov;
    step.lr = lr;
    step.weight_decay = weight_decay;
    step.beta1 = beta1;
    step.beta2 = beta2;
    step.eps = eps;
    step.momentum = momentum;
    step.dampening = dampening;
    step.factors = factors;
    step.limit = limit;
    step.divisor = divisor;
    step.lanes = lanes;
    std::vector<DeviceTensor> given;
    given.reserve(tensors.size());
    for (const auto& [parameter, gradient, first, second, largest, count, step_size, correction, fresh, aligned] : tensors)
        given.push_back({parameter, gradient, first, second, largest, count, step_size, correction, fresh, aligned});
    const GilReleased released;
    device_step(step, given, threads, variant);
}

using AdamTuple = std::tuple<std::uintptr_t, std::uintptr_t, std::uintptr_t, std::uintptr_t, std::uintptr_t, std::uint64_t,
                             double, double>;

void run_host_adam(const std::vector<AdamTuple>& tensors, bool wide, bool decoupled, bool maximize, double lr,
                   double weight_decay, double beta1, double beta2, double eps, double factor1, double factor2,
                   double limit, unsigned threads, const std::string& variant) {
    const HostAdam step{wide, decoupled, maximize, lr, weight_decay, beta1, beta2, eps, factor1, factor2, limit};
    std::vector<HostAdamTensor> given;
    given.reserve(tensors.size());
    for (const auto& [parameter, gradient, first, second, largest, count, step_size, correction] : tensors)
        given.push_back({parameter, gradient, first, second, largest, count, step_size, correction});
    const GilReleased released;
    host_adam(step, given, threads, variant);
}

}  // namespace

void bind_optim(nb::module_& module) {
    module.def("step_variants", &step_variants,
               "Names of the variants of `device_step` and `host_adam` that this CPU can run, fastest first.");
    module.def("host_adam", &run_host_adam, "tensors"_a, nb::kw_only(), "wide"_a, "decoupled"_a, "maximize"_a, "lr"_a,
               "weight_decay"_a, "beta1"_a, "beta2"_a, "eps"_a, "factor1"_a, "factor2"_a, "limit"_a, "threads"_a,
               "variant"_a = "", "One step of torch's fused CPU Adam or AdamW, to the bit, unscaling and clipping included.");
    module.def("device_step", &run_step, "tensors"_a, nb::kw_only(), "kind"_a, "family"_a, "dtype"_a, "decay"_a,
               "lr"_a, "weight_decay"_a, "beta1"_a, "beta2"_a, "eps"_a, "momentum"_a, "dampening"_a, "nesterov"_a,
               "maximize"_a, "factors"_a, "limit"_a, "divisor"_a, "lanes"_a, "threads"_a, "variant"_a = "",
               "One step of torch's CUDA optimizers, to the bit, over tensors in host memory.");
}

}  // namespace lastgood
