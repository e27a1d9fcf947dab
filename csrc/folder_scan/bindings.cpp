// Scan of adapter folders: thousands of them in one call, without the interpreter's lock.
//
// It is not a kernel. It is compiled into the same extension, so that the package has only one. The
// Python version in backend_src/vlora/adapters/catalog.py defines the bytes of a stamp.
#include <dirent.h>
#include <fcntl.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdint>
#include <cstring>
#include <memory>
#include <string>
#include <vector>

namespace py = pybind11;

namespace {

struct CloseFolder {
  void operator()(DIR* folder) const { closedir(folder); }
};
using Folder = std::unique_ptr<DIR, CloseFolder>;

// Returns the folder's entries in ascending order, without "." and "..". Sets `error` to the errno
// of a failed read, or to 0.
std::vector<std::string> sorted_entries(DIR* folder, int* error) {
  std::vector<std::string> names;
  errno = 0;
  while (const dirent* entry = readdir(folder)) {
    const std::string name = entry->d_name;
    if (name != "." && name != "..") names.push_back(name);
    errno = 0;
  }
  *error = errno;
  std::sort(names.begin(), names.end());
  return names;
}

// The stamp of a folder that cannot be read.
std::string error_stamp(int error) { return "!" + std::to_string(error); }

uint64_t nanoseconds(const timespec& time) {
  return uint64_t(int64_t(time.tv_sec) * 1000000000 + time.tv_nsec);
}

// Returns each entry's name, device, inode, size in bytes, and the times of its last modification
// and of its last change of status in nanoseconds. Programs that copy files in place can restore
// the first time, but not the second. Links are followed. An entry that cannot be looked up has
// zeros.
std::string folder_stamp(const std::string& path) {
  if (path.find('\0') != std::string::npos) return error_stamp(EINVAL);
  const Folder folder(opendir(path.c_str()));
  if (!folder) return error_stamp(errno);
  int error;
  std::string stamp;
  for (const std::string& name : sorted_entries(folder.get(), &error)) {
    struct stat status;
    uint64_t values[5] = {};
    if (fstatat(dirfd(folder.get()), name.c_str(), &status, 0) == 0) {
      values[0] = uint64_t(status.st_dev);
      values[1] = uint64_t(status.st_ino);
      values[2] = uint64_t(status.st_size);
      values[3] = nanoseconds(status.st_mtim);
      values[4] = nanoseconds(status.st_ctim);
    }
    stamp.append(name).push_back('\0');
    stamp.append(reinterpret_cast<const char*>(values), sizeof values);
  }
  return error ? error_stamp(error) : stamp;
}

// Returns whether an entry is a folder, a dangling link, or something that cannot be looked up. The
// last two are adapters that fail to load, so that their fault is reported.
bool may_be_adapter(int root, const std::string& name) {
  struct stat status;
  if (fstatat(root, name.c_str(), &status, 0) == 0) return S_ISDIR(status.st_mode);
  if (errno != ENOENT && errno != ENOTDIR && errno != ELOOP) return true;
  return fstatat(root, name.c_str(), &status, AT_SYMLINK_NOFOLLOW) == 0 && S_ISLNK(status.st_mode);
}

py::list to_bytes(const std::vector<std::string>& texts) {
  py::list list(texts.size());
  for (size_t i = 0; i < texts.size(); ++i) list[i] = py::bytes(texts[i]);
  return list;
}

py::list folder_stamps(const std::vector<std::string>& paths) {
  std::vector<std::string> stamps;
  {
    py::gil_scoped_release released;
    for (const std::string& path : paths) stamps.push_back(folder_stamp(path));
  }
  return to_bytes(stamps);
}

py::list adapter_names(const std::string& root) {
  std::vector<std::string> names;
  int error = 0;
  {
    py::gil_scoped_release released;
    const Folder folder(opendir(root.c_str()));
    if (!folder) error = errno;
    if (folder)
      for (const std::string& name : sorted_entries(folder.get(), &error))
        if (name[0] != '.' && may_be_adapter(dirfd(folder.get()), name)) names.push_back(name);
  }
  if (error) {
    errno = error;
    PyErr_SetFromErrno(PyExc_OSError);
    throw py::error_already_set();
  }
  return to_bytes(names);
}

}  // namespace

void bind_folder_scan(py::module_& m) {
  m.doc() = "Scan of adapter folders; vlora.adapters.catalog is its interface.";
  m.def("folder_stamps", &folder_stamps, py::arg("paths"));
  m.def("adapter_names", &adapter_names, py::arg("root"));
}
