// What folders of adapters look like now, thousands of them in one call without the interpreter's
// lock. Its twin in Python, which says what the bytes mean, is lora/folders.py.
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

struct Close {
  void operator()(DIR* folder) const { closedir(folder); }
};
using Folder = std::unique_ptr<DIR, Close>;

// The folder's entries in order, but for itself and its parent; errno tells what failed, 0 nothing.
std::vector<std::string> entries(DIR* folder, int* error) {
  std::vector<std::string> found;
  errno = 0;
  while (const dirent* entry = readdir(folder)) {
    const std::string name = entry->d_name;
    if (name != "." && name != "..") found.push_back(name);
    errno = 0;
  }
  *error = errno;
  std::sort(found.begin(), found.end());
  return found;
}

std::string failed(int error) { return "!" + std::to_string(error); }

std::string stamp(const std::string& path) {
  if (path.find('\0') != std::string::npos) return failed(EINVAL);
  const Folder folder(opendir(path.c_str()));
  if (!folder) return failed(errno);
  int error;
  std::string all;
  for (const std::string& name : entries(folder.get(), &error)) {
    struct stat found;
    uint64_t values[4] = {};
    if (fstatat(dirfd(folder.get()), name.c_str(), &found, 0) == 0) {
      values[0] = uint64_t(found.st_dev);
      values[1] = uint64_t(found.st_ino);
      values[2] = uint64_t(found.st_size);
      values[3] = uint64_t(int64_t(found.st_mtim.tv_sec) * 1000000000 + found.st_mtim.tv_nsec);
    }
    all.append(name).push_back('\0');
    all.append(reinterpret_cast<const char*>(values), sizeof values);
  }
  return error ? failed(error) : all;
}

bool may_be_adapter(int root, const std::string& name) {
  struct stat found;
  if (fstatat(root, name.c_str(), &found, 0) == 0) return S_ISDIR(found.st_mode);
  if (errno != ENOENT && errno != ENOTDIR && errno != ELOOP) return true;
  return fstatat(root, name.c_str(), &found, AT_SYMLINK_NOFOLLOW) == 0 && S_ISLNK(found.st_mode);
}

py::list as_bytes(const std::vector<std::string>& texts) {
  py::list all(texts.size());
  for (size_t i = 0; i < texts.size(); ++i) all[i] = py::bytes(texts[i]);
  return all;
}

py::list stamps(const std::vector<std::string>& paths) {
  std::vector<std::string> found;
  {
    py::gil_scoped_release released;
    for (const std::string& path : paths) found.push_back(stamp(path));
  }
  return as_bytes(found);
}

py::list inside(const std::string& root) {
  std::vector<std::string> found;
  int error = 0;
  {
    py::gil_scoped_release released;
    const Folder folder(opendir(root.c_str()));
    if (!folder) error = errno;
    if (folder)
      for (const std::string& name : entries(folder.get(), &error))
        if (name[0] != '.' && may_be_adapter(dirfd(folder.get()), name)) found.push_back(name);
  }
  if (error) {
    errno = error;
    PyErr_SetFromErrno(PyExc_OSError);
    throw py::error_already_set();
  }
  return as_bytes(found);
}

}  // namespace

void bind_folders(py::module_& m) {
  m.def("stamps", &stamps, py::arg("paths"));
  m.def("inside", &inside, py::arg("root"));
}
