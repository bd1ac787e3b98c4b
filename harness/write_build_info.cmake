# SPDX-License-Identifier: Apache-2.0
# Runs at every build and rewrites OUTPUT only when its content changes, so that the revision is that of the build and not of the
# configuration. Variables: SOURCE_DIR, TEMPLATE, OUTPUT, VERSION, COMPILER, BUILD_TYPE, CUDA.
set(REVISION unknown)
find_program(GIT git)
if(GIT)
  execute_process(COMMAND "${GIT}" -C "${SOURCE_DIR}" rev-parse HEAD
    OUTPUT_VARIABLE head RESULT_VARIABLE failed OUTPUT_STRIP_TRAILING_WHITESPACE ERROR_QUIET)
  if(NOT failed)
    execute_process(COMMAND "${GIT}" -C "${SOURCE_DIR}" diff --quiet HEAD RESULT_VARIABLE dirty ERROR_QUIET)
    set(REVISION "${head}")
    if(dirty)
      string(APPEND REVISION "-dirty")
    endif()
  endif()
endif()
configure_file("${TEMPLATE}" "${OUTPUT}" @ONLY)
