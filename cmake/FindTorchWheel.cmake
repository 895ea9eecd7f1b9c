# SPDX-License-Identifier: Apache-2.0
# LibTorch from PyPI's torch, without nvcc: imported targets on the wheel's shared libraries.
#   TorchWheel::cpu    libtorch_cpu, libc10 and their headers
#   TorchWheel::cuda   libtorch_cuda, libc10_cuda, the CUDA runtime and NCCL (only when torch was built with CUDA)
#
# SHARDPLAN_TORCH_DIR: the folder of the torch package (site-packages/torch). When not set, that of SHARDPLAN_PYTHON. When
#   that is not set either, of the first interpreter that has torch: the one that builds a wheel (Python3_EXECUTABLE,
#   Python_EXECUTABLE), that of the project's virtual environment, python3.
# SHARDPLAN_CUDA_ROOT: a CUDA toolkit to take CUDA and NCCL headers and libraries from. Not set: from the wheels that
#   torch brings (site-packages/nvidia), which are the ones it was built with; from /usr/local/cuda where there are none.

set(SHARDPLAN_TORCH_DIR "" CACHE PATH "Folder of the torch package; found through python when empty")
set(SHARDPLAN_CUDA_ROOT "" CACHE PATH "CUDA toolkit; the wheels' CUDA when empty")

set(_torch_dir "${SHARDPLAN_TORCH_DIR}")
if(NOT _torch_dir)
  set(_pythons "${SHARDPLAN_PYTHON}")
  if(NOT _pythons)
    find_program(_torch_python3 NAMES python3 python NO_CMAKE_PATH NO_CACHE)
    set(_pythons "${Python3_EXECUTABLE}" "${Python_EXECUTABLE}" "${CMAKE_CURRENT_LIST_DIR}/../.venv/bin/python3" "${_torch_python3}")
  endif()
  foreach(_python IN LISTS _pythons)
    if(_torch_dir OR NOT _python)
      continue()
    endif()
    execute_process(
      COMMAND "${_python}" -c
              "import importlib.util as u; s = u.find_spec('torch'); print(s.submodule_search_locations[0] if s else '', end='')"
      OUTPUT_VARIABLE _torch_dir ERROR_QUIET)
    if(_torch_dir)
      set(SHARDPLAN_PYTHON "${_python}" CACHE FILEPATH "Interpreter whose torch is used" FORCE)
    endif()
  endforeach()
endif()

include(FindPackageHandleStandardArgs)
set(TorchWheel_DIR "${_torch_dir}")
if(EXISTS "${_torch_dir}/version.py")
  file(STRINGS "${_torch_dir}/version.py" _version REGEX "__version__ =")
  string(REGEX REPLACE ".*'([0-9.]+).*" "\\1" TorchWheel_VERSION "${_version}")
endif()
find_library(_torch_cpu_library torch_cpu PATHS "${_torch_dir}/lib" NO_DEFAULT_PATH NO_CACHE)
find_package_handle_standard_args(
  TorchWheel REQUIRED_VARS TorchWheel_DIR _torch_cpu_library VERSION_VAR TorchWheel_VERSION
  REASON_FAILURE_MESSAGE "run tools/setup, set SHARDPLAN_TORCH_DIR, or configure with -DSHARDPLAN_EXECUTOR=OFF")
if(NOT TorchWheel_FOUND)
  return()
endif()

function(_torch_library name file)
  if(NOT TARGET ${name})
    add_library(${name} SHARED IMPORTED)
    set_target_properties(${name} PROPERTIES IMPORTED_LOCATION "${file}" IMPORTED_NO_SONAME FALSE)
  endif()
endfunction()

_torch_library(TorchWheel::c10 "${TorchWheel_DIR}/lib/libc10.so")
_torch_library(TorchWheel::torch_cpu "${TorchWheel_DIR}/lib/libtorch_cpu.so")
if(NOT TARGET TorchWheel::cpu)
  add_library(TorchWheel::cpu INTERFACE IMPORTED)
  target_include_directories(TorchWheel::cpu SYSTEM INTERFACE "${TorchWheel_DIR}/include"
                                                              "${TorchWheel_DIR}/include/torch/csrc/api/include")
  # torch/include brings a fmt of its own, which comes before the system's: its functions are in no library.
  target_compile_definitions(TorchWheel::cpu INTERFACE USE_DISTRIBUTED USE_C10D_GLOO _GLIBCXX_USE_CXX11_ABI=1
                                                       FMT_HEADER_ONLY=1)
  target_link_libraries(TorchWheel::cpu INTERFACE TorchWheel::torch_cpu TorchWheel::c10)
endif()

# TorchWheel_LIBRARY_DIRS: where a program finds these libraries at run time.
set(TorchWheel_LIBRARY_DIRS "${TorchWheel_DIR}/lib")

# CUDA: only if torch has it.
set(TorchWheel_CUDA_FOUND FALSE)
if(EXISTS "${TorchWheel_DIR}/lib/libtorch_cuda.so")
  get_filename_component(_site_packages "${TorchWheel_DIR}" DIRECTORY)
  if(SHARDPLAN_CUDA_ROOT)
    set(_cuda_roots "${SHARDPLAN_CUDA_ROOT}")
  else()
    file(GLOB _cuda_roots "${_site_packages}/nvidia/cu[0-9]*" "${_site_packages}/nvidia/cuda_runtime")
    list(APPEND _cuda_roots /usr/local/cuda)
  endif()
  find_path(TorchWheel_CUDA_INCLUDE crt/host_defines.h PATHS ${_cuda_roots} PATH_SUFFIXES include NO_DEFAULT_PATH NO_CACHE)
  find_library(TorchWheel_CUDART NAMES libcudart.so.13 libcudart.so.12 cudart NAMES_PER_DIR PATHS ${_cuda_roots}
               PATH_SUFFIXES lib lib64 NO_DEFAULT_PATH NO_CACHE)
  find_path(TorchWheel_NCCL_INCLUDE nccl.h PATHS "${_site_packages}/nvidia/nccl/include" ${_cuda_roots} /usr
            PATH_SUFFIXES include NO_DEFAULT_PATH NO_CACHE)
  find_library(TorchWheel_NCCL NAMES libnccl.so.2 nccl NAMES_PER_DIR PATHS "${_site_packages}/nvidia/nccl/lib" ${_cuda_roots} /usr
               PATH_SUFFIXES lib lib64 lib/x86_64-linux-gnu NO_DEFAULT_PATH NO_CACHE)
  if(TorchWheel_CUDA_INCLUDE AND TorchWheel_CUDART AND TorchWheel_NCCL_INCLUDE AND TorchWheel_NCCL)
    set(TorchWheel_CUDA_FOUND TRUE)
    foreach(_library IN ITEMS "${TorchWheel_CUDART}" "${TorchWheel_NCCL}")
      get_filename_component(_directory "${_library}" DIRECTORY)
      list(APPEND TorchWheel_LIBRARY_DIRS "${_directory}")
    endforeach()
    _torch_library(TorchWheel::c10_cuda "${TorchWheel_DIR}/lib/libc10_cuda.so")
    _torch_library(TorchWheel::cudart "${TorchWheel_CUDART}")
    _torch_library(TorchWheel::nccl "${TorchWheel_NCCL}")
    if(NOT TARGET TorchWheel::cuda)
      add_library(TorchWheel::cuda INTERFACE IMPORTED)
      target_include_directories(TorchWheel::cuda SYSTEM INTERFACE "${TorchWheel_CUDA_INCLUDE}"
                                                                   "${TorchWheel_NCCL_INCLUDE}")
      # No symbol of libtorch_cuda is used, and it would be left out; but torch finds its CUDA kernels only where it is
      # loaded.
      target_link_libraries(
        TorchWheel::cuda INTERFACE
        TorchWheel::cpu "-Wl,--push-state,--no-as-needed,${TorchWheel_DIR}/lib/libtorch_cuda.so,--pop-state" TorchWheel::c10_cuda
        TorchWheel::cudart TorchWheel::nccl)
    endif()
    message(STATUS "torch ${TorchWheel_VERSION}, CUDA from ${TorchWheel_CUDA_INCLUDE} and ${TorchWheel_CUDART}, NCCL ${TorchWheel_NCCL}")
  else()
    message(WARNING "torch has CUDA, but no CUDA runtime or NCCL was found: the cuda backend is left out")
  endif()
endif()
