// SPDX-License-Identifier: Apache-2.0
// The reference promises bits, which hold only under IEEE arithmetic as the language promises it. This measures it where it runs.
#pragma once

#include <string>
#include <vector>

namespace loopgauge::harness {

// What differs, one sentence each; empty when additions, products, quotients and square roots of binary32 are rounded to nearest even,
// subnormals are neither flushed nor read as zero, and a product and an addition are not contracted. Measured on every OpenMP thread.
std::vector<std::string> floating_point_faults();

}  // namespace loopgauge::harness
