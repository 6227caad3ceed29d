//! Loaded kernels by source, variant and name. They are compiled and loaded at first use; callers
//! keep the [`Function`].

use crate::device::{Device, Function};
use crate::error::Result;
use crate::images::Images;
use crate::sources::{Defines, Source};
use cudarc::driver::sys;
use std::collections::HashMap;
use std::ffi::CStr;
use std::ptr::null_mut;
use std::sync::{Mutex, PoisonError};

/// The kernels of one GPU.
pub struct Kernels {
    device: Device,
    images: Images,
    modules: Mutex<HashMap<(&'static str, Defines), Module>>,
    functions: Mutex<HashMap<(&'static str, Defines, &'static CStr), Function>>,
}

#[derive(Clone, Copy)]
struct Module(sys::CUmodule);

// SAFETY: a module handle is an address in the driver's tables; modules are never unloaded.
unsafe impl Send for Module {}

impl Kernels {
    pub fn new(device: &Device) -> Result<Self> {
        let (images, p) = (Images::open()?, device.properties());
        images.check(p.major * 10 + p.minor, p.shared_memory as usize)?;
        Ok(Self { device: device.clone(), images, modules: Mutex::default(), functions: Mutex::default() })
    }

    pub fn images(&self) -> &Images {
        &self.images
    }

    /// A kernel of a variant; `shared` is the dynamic shared memory it may be launched with.
    pub(crate) fn function(
        &self,
        source: &'static Source,
        defines: &Defines,
        name: &'static CStr,
        shared: usize,
    ) -> Result<Function> {
        let mut functions = self.functions.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(&function) = functions.get(&(source.file, defines.clone(), name)) {
            return Ok(function);
        }
        let module = self.module(source, defines)?;
        let mut function = null_mut();
        self.device.enter()?;
        // SAFETY: a live module, a NUL-terminated name and an out-parameter.
        self.device.check("cuModuleGetFunction", unsafe {
            sys::cuModuleGetFunction(&mut function, module.0, name.as_ptr())
        })?;
        let function = Function { handle: function, name };
        // Up to 48 KB are always allowed.
        if shared > 48 << 10 {
            self.device.allow_shared(function, shared)?;
        }
        functions.insert((source.file, defines.clone(), name), function);
        Ok(function)
    }

    fn module(&self, source: &'static Source, defines: &Defines) -> Result<Module> {
        let mut modules = self.modules.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(&module) = modules.get(&(source.file, defines.clone())) {
            return Ok(module);
        }
        let p = self.device.properties();
        let mut image = self.images.image(source, defines, p.major * 10 + p.minor)?;
        // PTX is text and must end with a zero byte; machine code may.
        image.push(0);
        self.device.enter()?;
        let mut module = null_mut();
        // SAFETY: a complete image, read before the call returns.
        self.device.check("cuModuleLoadData", unsafe {
            sys::cuModuleLoadData(&mut module, image.as_ptr().cast())
        })?;
        let module = Module(module);
        modules.insert((source.file, defines.clone()), module);
        Ok(module)
    }
}
