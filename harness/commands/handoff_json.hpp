// SPDX-License-Identifier: Apache-2.0
// What commands print of a handoff as JSON.
#pragma once

#include <nlohmann/json.hpp>

#include "models/run_record.hpp"

namespace loopgauge::harness {

nlohmann::ordered_json handoff_json(const HandoffRecord& handoff);

}  // namespace loopgauge::harness
