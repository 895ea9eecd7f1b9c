# SPDX-License-Identifier: Apache-2.0
# `cmake --install`: the command, the libraries with a find_package(shardplan) package, the Python package, the clusters.
# The wheel of pyproject.toml has the command, the Python package, clusters and models; that of executor/pyproject.toml
# what is built with one torch.
include(GNUInstallDirs)
include(CMakePackageConfigHelpers)

function(shardplan_install_command destination)
  install(TARGETS shardplan RUNTIME DESTINATION ${destination} COMPONENT wheel)
endfunction()

# rpath: where torch lies, seen from `destination`.
function(shardplan_install_run destination rpath)
  if(TARGET shardplan-run)
    set_target_properties(shardplan-run PROPERTIES INSTALL_RPATH "${rpath}")
    install(TARGETS shardplan-run RUNTIME DESTINATION ${destination} COMPONENT wheel)
  endif()
endfunction()

# Whoever preloads the library makes the links (libcuda.so.1) where it needs them: a wheel has none.
function(shardplan_install_device destination component)
  install(TARGETS shardplan_device shardplan_device_kernels LIBRARY DESTINATION ${destination} COMPONENT ${component})
  install(FILES ${CMAKE_BINARY_DIR}/device/torch_version DESTINATION ${destination} COMPONENT ${component})
endfunction()

if(SKBUILD AND NOT SHARDPLAN_EXECUTOR)
  shardplan_install_command(${SKBUILD_SCRIPTS_DIR})
  install(DIRECTORY tools/clusters/ DESTINATION ${SKBUILD_DATA_DIR}/share/shardplan/clusters COMPONENT wheel
          FILES_MATCHING PATTERN "*.json")
  install(DIRECTORY tools/models/ DESTINATION ${SKBUILD_DATA_DIR}/share/shardplan/models COMPONENT wheel
          FILES_MATCHING PATTERN "*.json.gz")
  include(cmake/AdapterSources.cmake)
  return()
endif()
if(SKBUILD)
  find_package(Python3 REQUIRED COMPONENTS Interpreter)
  set(site_packages "$ORIGIN/../lib/python${Python3_VERSION_MAJOR}.${Python3_VERSION_MINOR}/site-packages")
  shardplan_install_run(${SKBUILD_SCRIPTS_DIR} "${site_packages}/torch/lib;${site_packages}/nvidia/cu13/lib;${site_packages}/nvidia/nccl/lib")
  install(TARGETS _shardplan LIBRARY DESTINATION . COMPONENT wheel)
  if(TARGET shardplan_device)
    shardplan_install_device(_shardplan_device wheel)
  endif()
  return()
endif()

# Not INSTALL_RPATH_USE_LINK_PATH, which leaves out what lies in the source tree, as .venv does.
get_property(torch_library_dirs GLOBAL PROPERTY SHARDPLAN_TORCH_LIBRARY_DIRS)
shardplan_install_command(${CMAKE_INSTALL_BINDIR})
shardplan_install_run(${CMAKE_INSTALL_BINDIR} "${torch_library_dirs}")
set(share ${CMAKE_INSTALL_DATADIR}/shardplan)
install(DIRECTORY tools/python/shardplan tools/python/_shardplan-stubs DESTINATION ${share}/python
        FILES_MATCHING PATTERN "*.py" PATTERN "*.pyi" PATTERN "py.typed")
install(DIRECTORY tools/clusters DESTINATION ${share} FILES_MATCHING PATTERN "*.json")
install(DIRECTORY tools/models DESTINATION ${share} FILES_MATCHING PATTERN "*.json.gz")
install(DIRECTORY schemas/json DESTINATION ${share} FILES_MATCHING PATTERN "*.json")
if(TARGET _shardplan)
  set_target_properties(_shardplan PROPERTIES INSTALL_RPATH "${torch_library_dirs}")
  install(TARGETS _shardplan LIBRARY DESTINATION ${share}/python)
endif()
if(TARGET shardplan_device)
  shardplan_install_device(${share}/python/_shardplan_device Unspecified)
endif()

set(package ${CMAKE_INSTALL_LIBDIR}/cmake/shardplan)
function(shardplan_install_libraries export)
  foreach(library ${ARGN})
    set_target_properties(shardplan_${library} PROPERTIES EXPORT_NAME ${library})
    install(TARGETS shardplan_${library} EXPORT ${export} ARCHIVE DESTINATION ${CMAKE_INSTALL_LIBDIR})
  endforeach()
  install(EXPORT ${export} NAMESPACE shardplan:: DESTINATION ${package})
endfunction()

shardplan_install_libraries(shardplanTargets schemas checkpoints races verifier simulator planner policy)
foreach(library schemas schemas/checkpoints schemas/races schemas/verifier simulator planner)
  install(DIRECTORY ${library}/include/ DESTINATION ${CMAKE_INSTALL_INCLUDEDIR})
endforeach()
if(SHARDPLAN_EXECUTOR)
  shardplan_install_libraries(shardplanReplayTargets replay)
  shardplan_install_libraries(shardplanExecutorTargets executor executor_cuda runtime training)
  install(DIRECTORY executor/include/ DESTINATION ${CMAKE_INSTALL_INCLUDEDIR})
  install(FILES cmake/FindTorchWheel.cmake DESTINATION ${package})
endif()
configure_package_config_file(cmake/shardplanConfig.cmake.in ${CMAKE_CURRENT_BINARY_DIR}/shardplanConfig.cmake
                              INSTALL_DESTINATION ${package})
write_basic_package_version_file(${CMAKE_CURRENT_BINARY_DIR}/shardplanConfigVersion.cmake COMPATIBILITY SameMinorVersion)
install(FILES ${CMAKE_CURRENT_BINARY_DIR}/shardplanConfig.cmake ${CMAKE_CURRENT_BINARY_DIR}/shardplanConfigVersion.cmake
              cmake/shardplanPolicy.cmake
        DESTINATION ${package})
