// SPDX-License-Identifier: Apache-2.0
// Renderers: one report in, one text out. The same report always gives the same bytes; times come from the report.
#pragma once

#include <iosfwd>
#include <span>
#include <string_view>

#include "harness/report/report.hpp"

namespace loopgauge::harness {

using Renderer = void (*)(const Report& report, std::ostream& out);

void render_terminal(const Report& report, std::ostream& out);  // verdict, failures, status, conformance, speculation, handoffs, drift, memory
void render_json(const Report& report, std::ostream& out);      // everything the file holds; NaN and infinity are null
void render_csv(const Report& report, std::ostream& out);       // /cases and sums of its handoffs, a line per row (RFC 4180); NaN is empty
void render_markdown(const Report& report, std::ostream& out);  // a pull-request comment, below GitHub's 65,536 characters
void render_quality(const Report& report, std::ostream& out);   // quality against dense by setting, prompt length, task and depth
void render_html(const Report& report, std::ostream& out);      // one self-contained page
void render_junit(const Report& report, std::ostream& out);     // JUnit XML, a suite per executor

// JSON Schema (2020-12) of what render_json writes; published as reports/report.schema.json.
void render_json_schema(std::ostream& out);

// The formats that `report` and `sweep` print, the default first; --html and --junit of `report` write files. A new format is a renderer
// and a line here.
struct RendererInfo {
  std::string_view name;  // value of --output, and the flag --<name> of `report`
  std::string_view description;
  Renderer render;
};
std::span<const RendererInfo> renderers();

}  // namespace loopgauge::harness
