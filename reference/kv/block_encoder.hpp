// SPDX-License-Identifier: Apache-2.0
// Encodes one stream of one block: INT4 base (loop 1) or cross-loop residual (loops 2..4), and its reconstruction (S-KVQ-5..9,
// models/spec/residual_encode.hpp).
#pragma once

#include <functional>
#include <string>

#include "models/fault.hpp"
#include "models/run_record.hpp"
#include "reference/kv/kv_planes.hpp"

namespace loopgauge::reference {

// X_hat[1] = dec(enc(X[1])); X_hat[r] = X_hat[r-1] + dec(enc(X[r] - X_hat[r-1])) for the rows of the stream, X_hat[r-1] for the others.
// K groups: per channel over 64 compact rows of the block; V groups: per row over 64 channels of one head.
// `stream.rows` names the compact rows on entry, ascending positions within `block`; `stream.layers` is filled. Streams of a block are
// encoded in loop order. `where` begins an error message ("request 3"); a value outside the codec's range is a NumericError that adds
// tensor, loop, layer and group.
template <class Real>
void encode_stream(KvPlanes<Real>& planes, const ModelConfig& model, PositionRange block, int loop, CodecStream& stream, Fault fault,
                   const std::string& where);

// The reconstruction alone, from a stream that is encoded already: the same bits as encode_stream() leaves. Streams of a block in loop order.
template <class Real>
void reconstruct_stream(KvPlanes<Real>& planes, const ModelConfig& model, PositionRange block, int loop, const CodecStream& stream,
                        Fault fault);

// Rows of `positions` that stand in a sealed block in place of others are encoded into it (S-SPEC-9): K with the stored parameters of its
// groups, V, whose groups are one row each, anew. Their reconstruction follows. Streams of a block are encoded in loop order.
template <class Real>
void encode_rows_again(KvPlanes<Real>& planes, const ModelConfig& model, int loop, CodecStream& stream, PositionRange positions,
                       const std::string& where);

}  // namespace loopgauge::reference
