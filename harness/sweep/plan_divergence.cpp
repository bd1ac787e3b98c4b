// SPDX-License-Identifier: Apache-2.0
#include "harness/sweep/plan_divergence.hpp"

#include <algorithm>
#include <cmath>

#include "harness/compare/drift.hpp"
#include "harness/compare/significant.hpp"

namespace loopgauge::harness {

std::vector<DivergenceRow> plan_divergence(const RunRecord& serial, const RunRecord& actual) {
  std::vector<DivergenceRow> rows;
  for (std::size_t i = 0; i < std::min(serial.requests.size(), actual.requests.size()); ++i) {
    const RequestRecord& a = serial.requests[i];
    const RequestRecord& b = actual.requests[i];
    if (a.logits.empty() || b.logits.empty()) continue;
    const std::int64_t count = std::min(a.logits.shape[0], b.logits.shape[0]);
    for (std::int64_t row = 0; row < count; ++row) {
      if (row > 0 && a.tokens[static_cast<std::size_t>(row - 1)] != b.tokens[static_cast<std::size_t>(row - 1)]) break;
      const auto p = a.logits.row(row), q = b.logits.row(row);
      DivergenceRow out;
      out.request = static_cast<std::int64_t>(i);
      out.row = row;
      out.position = a.prompt_length - 1 + row;
      out.max_logit_difference = 0;
      for (std::size_t v = 0; v < p.size(); ++v) {
        // Equal infinities are no difference; a NaN stays visible.
        if (p[v] == q[v]) continue;
        const double difference = std::abs(static_cast<double>(p[v]) - static_cast<double>(q[v]));
        if (std::isnan(difference) || difference > out.max_logit_difference) out.max_logit_difference = difference;
        if (std::isnan(difference)) break;
      }
      out.kl = kl_divergence(p, q);
      out.same_top1 = argmax_lowest_id(p) == argmax_lowest_id(q);
      rows.push_back(out);
    }
  }
  return rows;
}

std::string divergence_summary(const std::vector<DivergenceRow>& rows) {
  const auto place = [](const DivergenceRow& row) {
    return "request " + std::to_string(row.request) + " position " + std::to_string(row.position);
  };
  const auto differs = [](const DivergenceRow& row) { return row.max_logit_difference != 0; };
  const auto different = std::count_if(rows.begin(), rows.end(), differs);
  if (different == 0) return "none of " + std::to_string(rows.size()) + " logits rows differs from the serial plan's";
  const auto first = std::find_if(rows.begin(), rows.end(), differs);
  const auto worst = std::max_element(rows.begin(), rows.end(), [](const DivergenceRow& a, const DivergenceRow& b) {
    return std::isnan(b.kl) ? !std::isnan(a.kl) : a.kl < b.kl;  // a NaN is the largest
  });
  const auto other_top1 = std::count_if(rows.begin(), rows.end(), [](const DivergenceRow& row) { return !row.same_top1; });
  return std::to_string(different) + " of " + std::to_string(rows.size()) + " logits rows differ from the serial plan's, first " +
         place(*first) + "; largest KL " + significant(worst->kl, 3) + " at " + place(*worst) + "; " + std::to_string(other_top1) +
         " with another top-1 token";
}

}  // namespace loopgauge::harness
