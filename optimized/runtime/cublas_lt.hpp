// SPDX-License-Identifier: Apache-2.0
// cuBLASLt matrix products y = x W^T without workspace: no split of K is possible then, so the bits of a row do not depend on how many
// rows are multiplied with it (measured at the Ouro shapes; linear_test checks the shapes in use).
#pragma once

#include <cublasLt.h>
#include <cuda_runtime_api.h>

#include <compare>
#include <map>
#include <memory>

namespace loopgauge::optimized {

class CublasLt {
 public:
  CublasLt();
  ~CublasLt();
  CublasLt(const CublasLt&) = delete;
  CublasLt& operator=(const CublasLt&) = delete;

  // x [rows, in] BF16 with rows `x_stride` elements apart, weight [out, in] BF16, y [rows, out] of BF16 or FP32 (`output`), FP32
  // accumulation and one rounding. The algorithm is the library's first choice for the shape and is kept for the life of this object.
  // Throws UnsupportedError when the library has no algorithm for the shape.
  void multiply(const void* x, int x_stride, const void* weight, void* y, cudaDataType_t output, int rows, int in, int out, cudaStream_t stream);

 private:
  struct Shape {
    int rows, in, out, x_stride;
    cudaDataType_t output;
    auto operator<=>(const Shape&) const = default;
  };
  struct Product;
  Product& product(const Shape& shape);

  cublasLtHandle_t handle_ = nullptr;
  std::map<Shape, std::unique_ptr<Product>> products_;
};

}  // namespace loopgauge::optimized
