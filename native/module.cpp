// plait._native: the kernels, as functions of addresses and sizes in bytes. plait/native.py and, for the
// codec, plait/compress/kernels.py are the only callers; they check what they are given, keep the memory
// alive and know the fallbacks.
#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include "codec.h"
#include "kernels.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace {

template <typename Byte>
Byte *at(std::uintptr_t address) {
    return reinterpret_cast<Byte *>(address);
}

std::vector<std::string> isas() {
    std::vector<std::string> names;
    for (auto [isa, name] : {std::pair{plait::Isa::scalar, "scalar"}, std::pair{plait::Isa::avx2, "avx2"},
                             std::pair{plait::Isa::avx512, "avx512"}})
        if (plait::available(isa)) names.emplace_back(name);
    return names;
}

}  // namespace

NB_MODULE(_native, m) {
    m.doc() = "Compiled kernels of plait; use them through plait.native.";
    m.def("isas", &isas, "Instruction sets that this machine can run, slowest first.");
    m.def(
        "read",
        [](std::uintptr_t data, std::size_t bytes, const std::string &isa) {
            return plait::read(at<const std::uint8_t>(data), bytes, plait::isa_named(isa));
        },
        "data"_a, "bytes"_a, "isa"_a, nb::call_guard<nb::gil_scoped_release>());
    m.def(
        "copy",
        [](std::uintptr_t target, std::uintptr_t source, std::size_t bytes, const std::string &isa) {
            plait::copy(at<std::uint8_t>(target), at<const std::uint8_t>(source), bytes, plait::isa_named(isa));
        },
        "target"_a, "source"_a, "bytes"_a, "isa"_a, nb::call_guard<nb::gil_scoped_release>());
    m.def(
        "checksum",
        [](std::uintptr_t data, std::size_t bytes, std::uint32_t start, const std::string &isa) {
            return plait::checksum(at<const std::uint8_t>(data), bytes, start, plait::isa_named(isa));
        },
        "data"_a, "bytes"_a, "start"_a, "isa"_a, nb::call_guard<nb::gil_scoped_release>());
    m.def(
        "paths",
        [](std::uintptr_t values, std::uintptr_t moving, std::uintptr_t weights, std::size_t layers,
           std::size_t places, std::size_t searches, bool wide, const std::string &isa) {
            const plait::Isa chosen = plait::isa_named(isa);
            if (wide)
                plait::paths(at<double>(values), at<const double>(moving), at<const double>(weights), layers, places,
                             searches, chosen);
            else
                plait::paths(at<float>(values), at<const float>(moving), at<const float>(weights), layers, places,
                             searches, chosen);
        },
        "values"_a, "moving"_a, "weights"_a, "layers"_a, "places"_a, "searches"_a, "wide"_a, "isa"_a,
        nb::call_guard<nb::gil_scoped_release>());
    m.def(
        "quantize",
        [](std::uintptr_t source, int dtype, std::size_t count, int bits, std::size_t bucket, bool stochastic,
           std::uint64_t key, std::uint64_t first_bucket, std::uintptr_t payload, std::uintptr_t residual, int threads,
           const std::string &isa) {
            plait::quantize(at<const void>(source), plait::Dtype{dtype}, count, {bits, bucket},
                            {stochastic, key, first_bucket}, at<std::uint8_t>(payload), at<float>(residual), threads,
                            plait::isa_named(isa));
        },
        "source"_a, "dtype"_a, "count"_a, "bits"_a, "bucket"_a, "stochastic"_a, "key"_a, "first_bucket"_a,
        "payload"_a, "residual"_a, "threads"_a, "isa"_a, nb::call_guard<nb::gil_scoped_release>());
    m.def(
        "dequantize",
        [](std::uintptr_t payload, std::size_t count, int bits, std::size_t bucket, std::uintptr_t target, int dtype,
           bool add, int threads, const std::string &isa) {
            plait::dequantize(at<const std::uint8_t>(payload), count, {bits, bucket}, at<void>(target),
                              plait::Dtype{dtype}, add, threads, plait::isa_named(isa));
        },
        "payload"_a, "count"_a, "bits"_a, "bucket"_a, "target"_a, "dtype"_a, "add"_a, "threads"_a, "isa"_a,
        nb::call_guard<nb::gil_scoped_release>());
}
