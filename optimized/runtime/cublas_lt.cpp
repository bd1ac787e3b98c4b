// SPDX-License-Identifier: Apache-2.0
#include "optimized/runtime/cublas_lt.hpp"

#include <string>

#include "optimized/runtime/cuda_check.hpp"

namespace loopgauge::optimized {

// The library is column-major: y^T [out, rows] = (weight^T)^T x^T, with weight^T [in, out] and x^T [in, rows].
struct CublasLt::Product {
  cublasLtMatmulDesc_t operation = nullptr;
  cublasLtMatrixLayout_t weight = nullptr, x = nullptr, y = nullptr;
  cublasLtMatmulAlgo_t algorithm{};

  ~Product() {
    if (y != nullptr) cublasLtMatrixLayoutDestroy(y);
    if (x != nullptr) cublasLtMatrixLayoutDestroy(x);
    if (weight != nullptr) cublasLtMatrixLayoutDestroy(weight);
    if (operation != nullptr) cublasLtMatmulDescDestroy(operation);
  }
};

CublasLt::CublasLt() { LOOPGAUGE_CUBLAS_CHECK(cublasLtCreate(&handle_)); }

CublasLt::~CublasLt() {
  if (handle_ != nullptr) cublasLtDestroy(handle_);
}

CublasLt::Product& CublasLt::product(const Shape& shape) {
  auto& entry = products_[shape];
  if (entry != nullptr) return *entry;
  auto made = std::make_unique<Product>();
  const cublasOperation_t transposed = CUBLAS_OP_T;
  LOOPGAUGE_CUBLAS_CHECK(cublasLtMatmulDescCreate(&made->operation, CUBLAS_COMPUTE_32F, CUDA_R_32F));
  LOOPGAUGE_CUBLAS_CHECK(cublasLtMatmulDescSetAttribute(made->operation, CUBLASLT_MATMUL_DESC_TRANSA, &transposed, sizeof transposed));
  LOOPGAUGE_CUBLAS_CHECK(cublasLtMatrixLayoutCreate(&made->weight, CUDA_R_16BF, shape.in, shape.out, shape.in));
  LOOPGAUGE_CUBLAS_CHECK(cublasLtMatrixLayoutCreate(&made->x, CUDA_R_16BF, shape.in, shape.rows, shape.x_stride));
  LOOPGAUGE_CUBLAS_CHECK(cublasLtMatrixLayoutCreate(&made->y, shape.output, shape.out, shape.rows, shape.out));

  cublasLtMatmulPreference_t preference = nullptr;
  LOOPGAUGE_CUBLAS_CHECK(cublasLtMatmulPreferenceCreate(&preference));
  const std::size_t no_workspace = 0;
  cublasStatus_t status = cublasLtMatmulPreferenceSetAttribute(preference, CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES, &no_workspace, sizeof no_workspace);
  cublasLtMatmulHeuristicResult_t choice{};
  int choices = 0;
  if (status == CUBLAS_STATUS_SUCCESS) {
    status = cublasLtMatmulAlgoGetHeuristic(handle_, made->operation, made->weight, made->x, made->y, made->y, preference, 1, &choice, &choices);
  }
  cublasLtMatmulPreferenceDestroy(preference);
  if (status == CUBLAS_STATUS_NOT_SUPPORTED || (status == CUBLAS_STATUS_SUCCESS && choices == 0)) {
    throw UnsupportedError("cuBLASLt has no algorithm without workspace for " + std::to_string(shape.rows) + " x " + std::to_string(shape.in) +
                           " times " + std::to_string(shape.in) + " x " + std::to_string(shape.out));
  }
  LOOPGAUGE_CUBLAS_CHECK(status);
  made->algorithm = choice.algo;
  entry = std::move(made);
  return *entry;
}

void CublasLt::multiply(const void* x, int x_stride, const void* weight, void* y, cudaDataType_t output, int rows, int in, int out,
                        cudaStream_t stream) {
  const Product& p = product({rows, in, out, x_stride, output});
  const float one = 1.0f;
  const float zero = 0.0f;
  LOOPGAUGE_CUBLAS_CHECK(cublasLtMatmul(handle_, p.operation, &one, weight, p.weight, x, p.x, &zero, y, p.y, y, p.y, &p.algorithm, nullptr, 0, stream));
}

}  // namespace loopgauge::optimized
