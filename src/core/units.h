// Plain SI quantities. Seconds, Bytes and Flops are doubles in cost models (sums of millions of
// terms, fractions of a shard); sizes that address memory are int64_t.
#pragma once

#include <string>

namespace motley {

using Seconds = double;
using Bytes = double;
using Flops = double;           // a count of floating-point operations
using FlopsPerSecond = double;  // a rate
using BytesPerSecond = double;

// For people: "1.25 ms", "3.1 GiB", "12.4 TFLOP".
std::string format_seconds(Seconds s);
std::string format_bytes(Bytes b);
std::string format_flops(Flops f);

// "10.4 Gbps", "25 GB/s", "15.7 TFLOPS", "16 GiB", "30 us" -> SI (bytes/s, flop/s, bytes, seconds);
// plain numbers are taken as SI. Throws UserError naming `field` if the text is not a quantity of
// that kind, is negative or not finite.
double parse_quantity(const std::string& text, const std::string& kind, const std::string& field);

}  // namespace motley
