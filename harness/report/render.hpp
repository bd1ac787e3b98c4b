// SPDX-License-Identifier: Apache-2.0
// Renderers: one report in, one text out. The same report always gives the same bytes; times come from the report.
#pragma once

#include <iosfwd>
#include <span>
#include <string_view>

#include "harness/report/report.hpp"

namespace loopgauge::harness {

using Renderer = void (*)(const Report& report, std::ostream& out);

void render_terminal(const Report& report, std::ostream& out);  // verdict, failures, status, conformance, drift, memory
void render_json(const Report& report, std::ostream& out);      // everything the file holds; NaN is null
void render_csv(const Report& report, std::ostream& out);       // /cases, a line per row (RFC 4180); NaN is empty

// The formats `report` and `sweep` offer, the default first. A new format is a renderer and a line here.
struct RendererInfo {
  std::string_view name;  // value of --output, and the flag --<name> of `report`
  std::string_view description;
  Renderer render;
};
std::span<const RendererInfo> renderers();

}  // namespace loopgauge::harness
